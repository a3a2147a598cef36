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
            if raw.isdigit() and 0 < int(raw[:12]) <= 86_400_000:
                deadline = int(raw) / 1000
            else:
                problem = RequestError(
                    Outcome.REJECTED_INVALID,
                    f"header x-laneway-deadline-ms is {raw[:32].decode('latin-1')!r}, expected milliseconds, "
                    "a whole number from 1 to 86400000",
                    param="x-laneway-deadline-ms",
                )
        length = found.get(b"content-length", b"")
        return cls(
            received=clock() if received is None else received,
            request_id=uuid.uuid4().hex if own_id else given.decode(),
            own_id=own_id,
            authorization=found.get(b"authorization"),
            content_length=int(length) if length.isdigit() else None,
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
