"""The ledger: no request is lost, and none is counted twice."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.ledger import NO_LANE, Entry, LaneCount, Ledger, State
from serving.timeline import Outcome

LANES = ("interactive-short", "interactive-long", "batch")


class Interleavings(RuleBasedStateMachine):
    """Requests that come, are classified, queue, run and end in any order, beside a plain list of what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: tuple[str, ...] = LANES
        self.ledger = Ledger(LANES)
        self.open: list[Entry] = []
        self.ended: list[Entry] = []

    def _pick(self, data: st.DataObject) -> Entry:
        return data.draw(st.sampled_from(self.open))

    @rule()
    def receive(self) -> None:
        self.open.append(self.ledger.receive())

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def classify(self, data: st.DataObject) -> None:
        self._pick(data).classify(data.draw(st.sampled_from(self.lanes)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), state=st.sampled_from(State))
    def move(self, data: st.DataObject, state: State) -> None:
        self._pick(data).move(state)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        entry = self._pick(data)
        entry.end(outcome)
        self.open.remove(entry)
        self.ended.append(entry)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def touch_what_has_ended(self, data: st.DataObject, outcome: Outcome) -> None:
        entry = data.draw(st.sampled_from(self.ended))
        with pytest.raises(RuntimeError, match="ended already"):
            entry.end(outcome)
        with pytest.raises(RuntimeError, match="ended already"):
            entry.classify("batch")
        with pytest.raises(RuntimeError, match="ended already"):
            entry.move(State.QUEUED)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def classify_into_a_lane_that_is_not(self, data: st.DataObject) -> None:
        with pytest.raises(KeyError):
            self._pick(data).classify("gold")

    @rule(name=st.sampled_from((*LANES, "medium")))
    def add_lane(self, name: str) -> None:
        self.ledger.add_lane(name)
        self.lanes = tuple(dict.fromkeys((*self.lanes, name)))

    @invariant()
    def every_lane_adds_up(self) -> None:
        for count in self.ledger.snapshot().values():
            assert count.drift == 0
            assert min(count.received, count.queued, count.running, *count.outcomes.values(), 0) == 0

    @invariant()
    def every_lane_holds_exactly_its_requests(self) -> None:
        snapshot = self.ledger.snapshot()
        assert set(snapshot) == {NO_LANE, *self.lanes}
        for lane, count in snapshot.items():
            mine = [entry for entry in self.open if entry.lane == lane]
            over = [entry for entry in self.ended if entry.lane == lane]
            assert count.received == len(mine) + len(over)
            assert count.queued == sum(entry.state is State.QUEUED for entry in mine)
            assert count.running == sum(entry.state is State.RUNNING for entry in mine)
            ended = Counter(entry.outcome for entry in over)
            assert {outcome: n for outcome, n in count.outcomes.items() if n} == dict(ended)


TestConservation = Interleavings.TestCase
TestConservation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_counts_in_lane_none_until_its_lane_is_known() -> None:
    """A refusal before the lane is known would be charged to a lane's error budget, or to nobody's."""
    ledger = Ledger(LANES)
    entry = ledger.receive()
    assert ledger.snapshot()[NO_LANE] == LaneCount(received=1, queued=0, running=1, outcomes={})
    entry.classify("batch")
    assert ledger.snapshot()[NO_LANE] == LaneCount(received=0, queued=0, running=0, outcomes={})
    assert ledger.snapshot()["batch"] == LaneCount(received=1, queued=0, running=1, outcomes={})


def test_a_snapshot_does_not_change_afterwards() -> None:
    """A scrape that is rendered while requests go on would show counts that do not add up."""
    ledger = Ledger(LANES)
    entry = ledger.receive()
    entry.end(Outcome.REJECTED_AUTH)
    before = ledger.snapshot()
    ledger.receive().end(Outcome.REJECTED_AUTH)
    assert before[NO_LANE] == LaneCount(received=1, queued=0, running=0, outcomes={Outcome.REJECTED_AUTH: 1})


def test_a_lane_that_is_added_again_keeps_its_counts() -> None:
    """Every edit of the spec would set the counters back, which a dashboard shows as a restart."""
    ledger = Ledger(LANES)
    ledger.receive().classify("batch")
    ledger.add_lane("batch")
    assert ledger.snapshot()["batch"].received == 1


def test_drift_shows_what_is_missing() -> None:
    """The alert on lost requests compares with 0: a drift that cancels out would never fire."""
    assert LaneCount(received=5, queued=1, running=1, outcomes={Outcome.COMPLETED: 2}).drift == 1
    assert LaneCount(received=1, queued=1, running=1, outcomes={}).drift == -1
