"""Scaling latency: from the first breach of a lane's objective to a new replica being ready."""

from serving.gateway.scaling import ScalingWatch
from serving.spec import parse
from tests.unit.gateway.bodies import SPEC_TEXT

WINDOW = 60.0


def _watch() -> tuple[ScalingWatch, list[tuple[str, str, float]]]:
    measured: list[tuple[str, str, float]] = []
    return ScalingWatch(parse(SPEC_TEXT), lambda *what: measured.append(what)), measured


def _age(watch: ScalingWatch, age: float, now: float, lane: str = "interactive-long", pool: str = "baseline") -> None:
    watch.queue_age("tiny", pool, lane, age, now)


def test_it_counts_from_the_first_breach_to_the_new_replica() -> None:
    """Counted from the last breach, a scaler that takes ten minutes would look instant."""
    watch, measured = _watch()
    for now, age in ((100.0, 0.5), (101.0, 1.5), (102.0, 2.5), (130.0, 30.0)):
        _age(watch, age, now)
    watch.replica_ready("baseline", 131.0)
    assert measured == [("tiny", "baseline", 30.0)]


def test_a_replica_that_nobody_waited_for_measures_nothing() -> None:
    """Start-up and restarts would drown the figure in zeros."""
    watch, measured = _watch()
    watch.replica_ready("baseline", 1.0)
    _age(watch, 1.0, 2.0)  # at the objective is within it
    _age(watch, 99.0, 2.0, lane="a lane that is gone")
    watch.replica_ready("baseline", 3.0)
    assert measured == []


def test_a_replica_of_another_pool_ends_no_measurement() -> None:
    """The pool that is short of replicas would seem to have got one."""
    watch, measured = _watch()
    _age(watch, 2.0, 10.0)
    watch.replica_ready("candidate", 11.0)
    assert measured == []
    watch.replica_ready("baseline", 15.0)
    assert measured == [("tiny", "baseline", 5.0)]


def test_a_load_that_went_away_by_itself_is_forgotten_after_a_window() -> None:
    """Else the next replica, days later, is a scaling latency of days."""
    watch, measured = _watch()
    _age(watch, 2.0, 10.0)
    _age(watch, 0.0, 10.0 + WINDOW)
    watch.replica_ready("baseline", 10.0 + WINDOW)
    assert measured == [("tiny", "baseline", WINDOW)], "a pause shorter than a window is the same overload"
    _age(watch, 2.0, 100.0)
    _age(watch, 0.0, 100.1 + WINDOW)
    watch.replica_ready("baseline", 200.0)
    assert len(measured) == 1


def test_one_lane_at_rest_does_not_end_another_lane_s_breach() -> None:
    """Lanes are looked at in turn every second: the quiet ones would reset the clock of the full one."""
    watch, measured = _watch()
    for second in range(100):
        _age(watch, 2.0, float(second))
        _age(watch, 0.0, float(second), lane="interactive-short")
    watch.replica_ready("baseline", 100.0)
    assert measured == [("tiny", "baseline", 100.0)]


def test_each_replica_is_measured_from_where_the_last_one_left_off() -> None:
    """The second of two replicas would count the first one's time again."""
    watch, measured = _watch()
    _age(watch, 2.0, 0.0)
    watch.replica_ready("baseline", 10.0)
    watch.replica_ready("baseline", 11.0)
    _age(watch, 2.0, 12.0)
    watch.replica_ready("baseline", 20.0)
    assert measured == [("tiny", "baseline", 10.0), ("tiny", "baseline", 8.0)]


def test_a_new_spec_brings_new_objectives_and_drops_queues_that_are_gone() -> None:
    """A pool that was taken out and comes back next week would report a week."""
    watch, measured = _watch()
    _age(watch, 2.0, 0.0, pool="gone")
    _age(watch, 2.0, 0.0)
    watch.set_spec(parse(SPEC_TEXT.replace("ttft: {seconds: 1}", "ttft: {seconds: 5}")))
    watch.replica_ready("gone", 50.0)
    watch.replica_ready("baseline", 50.0)
    assert measured == [("tiny", "baseline", 50.0)]
    _age(watch, 4.0, 60.0)
    watch.replica_ready("baseline", 61.0)
    assert len(measured) == 1
