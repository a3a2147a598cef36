"""Exact conservation: at every instant, per lane, received = queued + running + the sum of outcomes.

A request is one `Entry`; only its owner moves it. Moves are plain synchronous calls on the event loop, so a snapshot
taken there never sees a torn state. Until its lane is known a request counts in lane `none`.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from serving.timeline import Outcome

NO_LANE = "none"


class State(StrEnum):
    """Where a request is that has no outcome yet."""

    QUEUED = "queued"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class LaneCount:
    """A lane's counts at one instant."""

    received: int
    queued: int
    running: int
    outcomes: dict[Outcome, int]

    @property
    def drift(self) -> int:
        """received − queued − running − Σ outcomes. Anything but 0 is a defect, and is alerted on."""
        return self.received - self.queued - self.running - sum(self.outcomes.values())


@dataclass(slots=True)
class _Lane:
    received: int = 0
    states: Counter[State] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)


class Ledger:
    """The counts of all lanes. Not thread-safe on purpose: it lives on the event loop."""

    def __init__(self, lanes: tuple[str, ...]) -> None:
        self._lanes = {name: _Lane() for name in (NO_LANE, *lanes)}

    def receive(self) -> "Entry":
        """A request's head was read; its lane is not known yet."""
        lane = self._lanes[NO_LANE]
        lane.received += 1
        lane.states[State.RUNNING] += 1
        return Entry(self)

    def snapshot(self) -> dict[str, LaneCount]:
        """Every lane's counts, `none` included."""
        return {
            name: LaneCount(
                received=lane.received,
                queued=lane.states[State.QUEUED],
                running=lane.states[State.RUNNING],
                outcomes=dict(lane.outcomes),
            )
            for name, lane in self._lanes.items()
        }

    def add_lane(self, name: str) -> None:
        """A lane that a new spec brought; known ones keep their counts."""
        self._lanes.setdefault(name, _Lane())


class Entry:
    """One request's place in the ledger."""

    __slots__ = ("_ledger", "lane", "outcome", "state")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.lane = NO_LANE
        self.state: State | None = State.RUNNING
        self.outcome: Outcome | None = None

    def classify(self, lane: str) -> None:
        """Its lane is known: it leaves lane `none` altogether, so that no request is counted twice."""
        self._check_open()
        assert self.state is not None
        old, new = self._ledger._lanes[self.lane], self._ledger._lanes[lane]
        old.received -= 1
        old.states[self.state] -= 1
        new.received += 1
        new.states[self.state] += 1
        self.lane = lane

    def move(self, state: State) -> None:
        """To the queue, or out of it."""
        self._check_open()
        assert self.state is not None
        lane = self._ledger._lanes[self.lane]
        lane.states[self.state] -= 1
        lane.states[state] += 1
        self.state = state

    def end(self, outcome: Outcome) -> None:
        """Its one outcome.

        Raises:
            RuntimeError: it has one already.
        """
        self._check_open()
        assert self.state is not None
        lane = self._ledger._lanes[self.lane]
        lane.states[self.state] -= 1
        lane.outcomes[outcome] += 1
        self.state = None
        self.outcome = outcome

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise RuntimeError(f"the request has ended already: {self.outcome}")
