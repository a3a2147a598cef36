"""PrefillOrder: what an engine has been sent and has not computed, estimated from outside.

The engine is taken to compute prompts in the order in which it got them (vLLM's FCFS does). So only the first one has
progress: its rate × the time since the one before it ended, and no more than its own length until the engine says so.
"""

from collections import OrderedDict

from serving.scheduling.rates import PrefillTime
from serving.scheduling.ticket import Ticket

UNKNOWN_PREFILL = 0.25
"""Seconds after which a request that does not stream is taken as computed while no rate was measured."""

ROUNDING = 1e-6
"""Seconds by which a wake-up is later than its estimate, so that it does not come a rounding error too early."""

SAME_STEP = 0.002
"""Seconds: first tokens closer together than this come from one engine step, and share its time."""


class PrefillOrder:
    """Uncomputed tickets of one replica (or of one lane at a replica, where the engine has lanes of its own).

    Args:
        turn: prompts above so many tokens are large, and hold a seat.
        ending: a large prompt gives up its seat when no more than this many tokens of it are left, estimated.
    """

    def __init__(self, turn: int, ending: int) -> None:
        self._turn = turn
        self._ending = min(ending, turn)
        self._order: OrderedDict[Ticket, float] = OrderedDict()  # → when it was sent
        self._seated: set[Ticket] = set()
        self._tokens = 0
        self._small: dict[str, int] = {}
        self._progress = 0.0
        self._work_start = 0.0
        self._last_large = False
        self._small_time = PrefillTime()
        self._large_time = PrefillTime(curved=True)
        self.scraped_rate: float | None = None

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._order

    def large(self, ticket: Ticket) -> bool:
        """It takes several turns."""
        return ticket.tokens > self._turn

    def add(self, ticket: Ticket, now: float) -> None:
        """It was sent."""
        if not self._order:
            self._work_start, self._progress = now, 0.0
        self._order[ticket] = now
        self._tokens += ticket.tokens
        if self.large(ticket):
            self._seated.add(ticket)
        else:
            self._small[ticket.lane] = self._small.get(ticket.lane, 0) + ticket.tokens

    def computed(self, ticket: Ticket, now: float) -> None:
        """The engine said so, by a first token: also a measurement of its rate."""
        if ticket not in self._order:
            return
        if ticket is self._first:
            seconds = now - self._work_start
            large = self._last_large if seconds < SAME_STEP else self.large(ticket)
            (self._large_time if large else self._small_time).add(ticket.tokens, seconds)
            self._last_large = large
            self._remove(ticket, now)
        else:  # It overtook the first: the engine's time went to it.
            self._remove(ticket, min(now, self._work_start + (self._seconds(ticket, ticket.tokens) or 0.0)))
        self.settle(now)

    def left(self, ticket: Ticket, now: float) -> None:
        """It ended without a first token (aborted, failed, or not streamed): it costs nothing more."""
        if ticket in self._order:
            self._remove(ticket, now if ticket is self._first else self._work_start)
            self.settle(now)

    def idle(self, sent_before: float, now: float) -> None:
        """The engine has nothing: whatever was sent before that time is not there any more."""
        for ticket in [ticket for ticket, sent in self._order.items() if sent < sent_before]:
            self._remove(ticket, now)

    def settle(self, now: float) -> None:
        """Brings the estimates to `now`. Amortised O(1)."""
        while (first := self._first) is not None:
            self._progress = min(float(first.tokens), self._computed_by(first, now))
            seconds = self._seconds(first, first.tokens)
            done_at = self._order[first] + UNKNOWN_PREFILL if seconds is None else self._work_start + seconds
            if first in self._seated and first.tokens - self._progress <= self._ending:
                self._seated.discard(first)
            if first.streamed or done_at > now:
                return
            self._remove(first, self._work_start if seconds is None else done_at)

    @property
    def seats_used(self) -> int:
        """Large prompts with more than `ending` tokens to go."""
        return len(self._seated)

    @property
    def progress(self) -> float:
        """Tokens of the first ticket that are computed, estimated."""
        return self._progress

    @property
    def outstanding(self) -> float:
        """Uncomputed tokens, large ones included."""
        return self._tokens - self._progress

    def small_tokens(self, lane: str) -> float:
        """Uncomputed tokens of the lane's prompts of one turn at most."""
        tokens = float(self._small.get(lane, 0))
        first = self._first
        if first is not None and first.lane == lane and not self.large(first):
            tokens -= self._progress
        return tokens

    @property
    def rate(self) -> float | None:
        """Prompt tokens a second over prompts of all sizes, else as scraped; None before either was measured."""
        return PrefillTime.rate(self._small_time, self._large_time) or self.scraped_rate

    def time_of_progress(self, tokens: float) -> float | None:
        """When the first ticket's progress reaches `tokens`, or it is taken as computed; None: only an event tells."""
        first = self._first
        if first is None:
            return None
        if tokens > first.tokens and first.streamed:
            return None
        seconds = self._seconds(first, min(tokens, first.tokens))
        if seconds is not None:
            return self._work_start + seconds + ROUNDING
        return None if first.streamed else self._order[first] + UNKNOWN_PREFILL

    def time_of_seat(self) -> float | None:
        """When a large prompt at the head will be within `ending`; None: only an event tells."""
        first = self._first
        if first is None or (not self.large(first) and first.streamed):
            return None
        return self.time_of_progress(first.tokens - (self._ending if first in self._seated else 0))

    @property
    def _first(self) -> Ticket | None:
        return next(iter(self._order), None)

    def _time(self, ticket: Ticket) -> PrefillTime | None:
        """The model of its kind; while that is not measured, of the other."""
        both = (self._large_time, self._small_time) if self.large(ticket) else (self._small_time, self._large_time)
        return next((model for model in both if model.measured), None)

    def _seconds(self, ticket: Ticket, tokens: float) -> float | None:
        """To compute so many of its tokens; None while nothing was measured."""
        if (model := self._time(ticket)) is not None:
            return model.seconds(tokens)
        return tokens / self.scraped_rate if self.scraped_rate else None

    def _computed_by(self, ticket: Ticket, now: float) -> float:
        elapsed = max(0.0, now - self._work_start)
        if (model := self._time(ticket)) is not None:
            return model.tokens(elapsed)
        return elapsed * self.scraped_rate if self.scraped_rate else 0.0

    def _remove(self, ticket: Ticket, work_start: float) -> None:
        first = ticket is self._first
        del self._order[ticket]
        self._tokens -= ticket.tokens
        self._seated.discard(ticket)
        if not self.large(ticket):
            self._small[ticket.lane] -= ticket.tokens
        self._work_start = max(work_start, self._work_start)
        if first:
            self._progress = 0.0
