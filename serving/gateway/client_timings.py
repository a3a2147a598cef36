"""`POST /v1/client-timings`: what a client's reader saw of a request that this gateway served.

Server fast and client slow is then a fact. A report is believed at most once a request, only from the key that made
the request, only for requests that are remembered (bounded in number and time).
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from serving.gateway.errors import RequestError
from serving.telemetry.catalog import TimingResult
from serving.timeline import Outcome, Timeline

REMEMBERED = 100_000
REMEMBERED_SECONDS = 600.0
LONGEST_SECONDS = 86_400.0
MAX_BODY_BYTES = 4096
_REGION = re.compile(r"[a-z0-9-]{1,32}")


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """One report. Seconds on the client's own clock, from its sending of the request."""

    request_id: str
    ttft: float
    total: float
    region: str | None


@dataclass(slots=True)
class _Ended:
    model: str | None
    lane: str
    cohort: str
    ttft: float | None
    at: float
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """A report that is believed, beside what the gateway measured of the same request."""

    timings: ClientTimings
    model: str | None
    lane: str
    cohort: str
    gateway_ttft: float | None


class RecentRequests:
    """The requests that a report may still be about."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: OrderedDict[tuple[str, str], _Ended] = OrderedDict()

    def remember(self, timeline: Timeline, caller: str) -> None:
        """A request ended; only one that saw a first token can be reported on."""
        if timeline.first_token is None:
            return
        now = self._clock()
        key = (caller, timeline.request_id)  # two callers may have chosen the same id
        self._ended[key] = _Ended(timeline.model, timeline.lane, timeline.cohort, timeline.ttft, now)
        self._ended.move_to_end(key)
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= REMEMBERED and now - oldest.at <= REMEMBERED_SECONDS:
                break
            self._ended.popitem(last=False)

    def take(self, timings: ClientTimings, caller: str) -> Accepted | TimingResult:
        """Believes a report, once; else says why not. Another key's request is as unknown as one that never was."""
        ended = self._ended.get((caller, timings.request_id))
        if ended is None or self._clock() - ended.at > REMEMBERED_SECONDS:
            return TimingResult.UNKNOWN_REQUEST
        if ended.reported:
            return TimingResult.REPEATED
        ended.reported = True
        return Accepted(timings, ended.model, ended.lane, ended.cohort, ended.ttft)


def parse_timings(body: bytes) -> ClientTimings:
    """The report of a body.

    Raises:
        RequestError: it is not one; the message names the field, the value and what was expected.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise _refused(None, "the body is not JSON, expected an object") from None
    if not isinstance(data, dict):
        raise _refused(None, f"the body is {type(data).__name__}, expected an object")
    request_id = data.get("request_id")
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= 128:
        raise _refused("request_id", "request_id is missing or no string of 1 to 128 characters")
    region = data.get("region")
    if region is not None and (not isinstance(region, str) or not _REGION.fullmatch(region)):
        raise _refused("region", "region is no string of 1 to 32 characters of a-z, 0-9 and -")
    ttft, total = _seconds(data, "ttft"), _seconds(data, "total")
    if total < ttft:
        raise _refused("total", f"total is {total!r}, expected at least ttft ({ttft!r})")
    return ClientTimings(request_id, ttft, total, region)


def _seconds(data: dict[str, Any], name: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused(name, f"{name} is missing or no number, expected seconds")
    if not 0 <= value <= LONGEST_SECONDS:
        raise _refused(name, f"{name} is {value!r}, expected seconds from 0 to {LONGEST_SECONDS:g}")
    return float(value)


def _refused(param: str | None, message: str) -> RequestError:
    return RequestError(Outcome.REJECTED_INVALID, message, param=param)
