"""uvicorn's HTTP protocol with what it lacks: the moment a head was read, bounds on a head's size and
time, and an answer to health checks that no load delays."""

import time
from asyncio import BaseTransport, TimerHandle, Transport
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RECEIVED = "laneway.received"
"""Key of the ASGI scope: when the request's head was read, seconds of the monotonic clock."""
LINGER_SECONDS = 1.0
"""How long what a refused client still sends is read and thrown away."""
ABORT = "laneway.abort"
"""Key of the ASGI scope: closes the connection at once, whatever is still to be written. uvicorn only knows how to
close once everything is written, which a client that does not read puts off for ever."""

HEALTH_PATH = b"/healthz"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n%b\r\n" + b'{"status":"ok"}'


def bounded_protocol(max_header_bytes: int, head_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol class with these bounds: bytes of a head, seconds from its first byte to its last."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _head_timer: TimerHandle | None = None
        _refused = False
        _answered = False

        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(cast("Transport", transport))
            self._head_timer = self.loop.call_later(head_timeout, self._head_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            # The parser keeps a head until it is whole, however long it is: count before it sees the bytes.
            if self._in_head:
                if self._head_timer is None:
                    self._head_timer = self.loop.call_later(head_timeout, self._head_late)
                self._head_bytes += len(data)
                if self._head_bytes > max_header_bytes and b"\r\n\r\n" not in data[: max_header_bytes + 4]:
                    self._refuse(431, f"the request's head is larger than {max_header_bytes} bytes")
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            self._stop_head_timer()
            size = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > max_header_bytes:
                self._refuse(431, f"the request's head is larger than {max_header_bytes} bytes")
                return
            if self._is_health_check():
                self._answer_health_check()
                return
            scope = cast("dict[str, Any]", self.scope)
            scope[RECEIVED] = time.monotonic()
            scope[ABORT] = self.transport.abort
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused and not self._answered:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused and not self._answered:
                super().on_message_complete()
            self._in_head = True
            self._answered = False

        def _is_health_check(self) -> bool:
            idle = self.cycle is None or self.cycle.response_complete
            return idle and self.url == HEALTH_PATH and self.parser.get_method() == b"GET"

        def _answer_health_check(self) -> None:
            # Here, before there is a task: behind one, the answer waits for every stream that has a token to pass on.
            self._answered = True
            if not self.parser.should_keep_alive():
                self.transport.write(HEALTHY % b"connection: close\r\n")
                self.transport.close()
                return
            self.transport.write(HEALTHY % b"")
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def _head_late(self) -> None:
            self._head_timer = None
            if (
                not self._refused
                and not self.transport.is_closing()
                and self._in_head
                and (self.cycle is None or self._head_bytes)
            ):
                self._refuse(408, f"the request's head was not whole within {head_timeout:g} s")

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, status: int, message: str) -> None:
            body = (
                b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":"rejected_invalid"}}'
                % message.encode()
            )
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, b"Request Header Fields Too Large" if status == 431 else b"Request Timeout", len(body), body)
            )
            # A close with bytes unread resets the connection, and the client would not see why: read on for a moment.
            self._refused = True
            self._stop_head_timer()
            self.transport.write_eof()
            self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    return BoundedProtocol
