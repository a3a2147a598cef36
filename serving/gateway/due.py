"""When and why an exchange is stopped from outside its own task."""

import asyncio
from collections.abc import Callable
from enum import Enum

TIMER_SLACK = 0.001
"""Seconds: a timer that fires by so much too late is left alone."""


class Stop(Enum):
    """Why an exchange is stopped from outside its own task."""

    CLIENT_LEFT = "the client closed the connection"
    SLOW_READER = "the client stopped reading"
    BODY = "the body was not whole in time"
    FIRST_TOKEN = "no first token in time"
    IDLE = "no further token in time"
    TOTAL = "not done in time"


class Due:
    """The next deadline of a request. One timer, moved only when it would fire too late."""

    __slots__ = ("_clock", "_due", "_last", "_stop", "_timer", "_when")

    def __init__(self, clock: Callable[[], float], last: float, due: Callable[[Stop], None]) -> None:
        """`last`: whatever else is set, `due(Stop.TOTAL)` is called then (seconds of `clock`)."""
        self._clock = clock
        self._last = last
        self._due = due
        self._when = last
        self._stop = Stop.TOTAL
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float, stop: Stop) -> None:
        """`due(stop)` is called at `when`, unless another time is set before."""
        self._when = when
        self._stop = stop
        if self._timer is None or self._timer.when() > when + TIMER_SLACK:
            self.cancel()
            self._arm(when)

    def cancel(self) -> None:
        """Nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, when - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock()
        if now >= self._last:
            self._due(Stop.TOTAL)
        elif now < self._when:
            self._arm(min(self._when, self._last))
        else:
            self._due(self._stop)
