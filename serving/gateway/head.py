"""A request's head: the few headers that the gateway reads, and those that go on to the engine."""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.gateway.errors import RequestError
from serving.gateway.uvicorn_protocol import RECEIVED
from serving.timeline import Outcome

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACE = (b"traceparent", b"tracestate")
_MILLISECONDS = re.compile(rb"0*([1-9][0-9]{0,7})")
_MOST_MILLISECONDS = 86_400_000
_LIKE_A_NUMBER = re.compile(rb"[-+0-9.,eE]{1,24}(ms|s)?")
"""What an error may quote of a header: with anything else there might be a key in it."""
_DIGITS = 19
"""Of a whole number that is still told apart from others; none that we take is nearly as long."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a request's head says."""

    received: float
    request_id: str
    own_id: bool
    """The gateway made the id: it is unique, where a client's need not be."""
    authorization: bytes | None
    content_length: int | None
    lane: str | None
    """`x-laneway-lane`: a wish."""
    deadline: float | None
    """`x-laneway-deadline-ms`, in seconds from receipt."""
    session: str | None
    trace_headers: tuple[tuple[bytes, bytes], ...]
    problem: RequestError | None
    """A header that cannot be understood; told once the caller is known."""

    @classmethod
    def read(cls, scope: Mapping[str, Any], clock: Callable[[], float]) -> "Head":
        """Reads the ASGI scope; never raises."""
        received = scope.get(RECEIVED)
        found: dict[bytes, bytes] = {}
        trace: list[tuple[bytes, bytes]] = []
        for name, value in scope["headers"]:
            if name in _TRACE:
                trace.append((name, value))
            else:
                found[name] = value
        given = found.get(b"x-request-id", b"")
        own_id = _SAFE_ID.fullmatch(given) is None
        problem: RequestError | None = None
        deadline: float | None = None
        if (raw := found.get(b"x-laneway-deadline-ms")) is not None:
            if (match := _MILLISECONDS.fullmatch(raw)) and int(match[1]) <= _MOST_MILLISECONDS:
                deadline = int(match[1]) / 1000
            else:
                got = repr(raw.decode()) if _LIKE_A_NUMBER.fullmatch(raw) else f"a string of {len(raw)} characters"
                problem = RequestError(
                    Outcome.REJECTED_INVALID,
                    f"header x-laneway-deadline-ms is {got}, expected milliseconds, "
                    f"a whole number from 1 to {_MOST_MILLISECONDS}",
                    param="x-laneway-deadline-ms",
                )
        length = found.get(b"content-length", b"")
        return cls(
            received=clock() if received is None else received,
            request_id=uuid.uuid4().hex if own_id else given.decode(),
            own_id=own_id,
            authorization=found.get(b"authorization"),
            content_length=int(length.lstrip(b"0")[:_DIGITS] or 0) if length.isdigit() else None,
            lane=_text(found.get(b"x-laneway-lane")),
            deadline=deadline,
            session=_text(found.get(b"x-session-id")),
            trace_headers=tuple(trace),
            problem=problem,
        )

    def upstream_headers(self, trace: Iterable[tuple[bytes, bytes]], host: str | None) -> dict[str, str]:
        """Headers towards the engine. The client's own stay here: credentials, and what could steer the engine."""
        # An engine may take the id for its own, where two requests of one id would collide.
        unique = self.request_id if self.own_id else f"{self.request_id}-{uuid.uuid4().hex[:8]}"
        headers = {"Content-Type": "application/json", "X-Request-Id": unique}
        for name, value in trace:
            headers[name.decode("latin-1")] = value.decode("latin-1")
        if host is not None:
            headers["Host"] = host
        return headers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:256].decode("latin-1")
