"""Errors in the OpenAI shape, each with the one outcome that it ends its request with."""

from collections.abc import Mapping
from types import MappingProxyType

import orjson

from serving.timeline import Outcome

STATUS: Mapping[Outcome, int] = MappingProxyType(
    {
        Outcome.REJECTED_FULL: 429,
        Outcome.REJECTED_INFEASIBLE: 429,
        Outcome.REJECTED_QUOTA: 429,
        Outcome.REJECTED_ENGINE: 429,
        Outcome.REJECTED_INVALID: 400,
        Outcome.REJECTED_AUTH: 401,
        Outcome.EXPIRED: 504,
        Outcome.ENGINE_TIMEOUT: 504,
        Outcome.NO_REPLICA: 503,
        Outcome.DRAINING: 503,
        Outcome.ENGINE_ERROR: 502,
    }
)
"""HTTP status of each outcome, where an error does not name its own."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestError(Exception):
    """A request ends without (the whole of) an answer. The message names the field, the value and what was expected;
    it never quotes a prompt or a key."""

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
        raw_body: bytes | None = None,
    ) -> None:
        """`code`: the OpenAI API's own, where it has one, else the outcome. `retry_after`: seconds. `raw_body`: the
        engine's own error, passed to the client as it came."""
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.param = param
        self.code = code or str(outcome)
        self.status = STATUS[outcome] if status is None else status
        self.retry_after = retry_after
        self.raw_body = raw_body


def _error(error: RequestError) -> dict[str, object]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
            "outcome": str(error.outcome),
        }
    }


def error_body(error: RequestError) -> bytes:
    """The JSON body of an error answer."""
    return orjson.dumps(_error(error))


def error_event(error: RequestError) -> bytes:
    """The last event of a stream that failed after its head was sent."""
    return b"data: " + orjson.dumps(_error(error)) + b"\n\n"
