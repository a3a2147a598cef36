"""uvicorn's HTTP protocol with what it lacks: the moment a head was read, and bounds on a head's size and time."""

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


def bounded_protocol(max_header_bytes: int, head_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol class with these bounds: bytes of a head, seconds from its first byte to its last."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _head_timer: TimerHandle | None = None
        _refused = False

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
            scope = cast("dict[str, Any]", self.scope)
            scope[RECEIVED] = time.monotonic()
            scope[ABORT] = self.transport.abort
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                super().on_message_complete()
            self._in_head = True

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
