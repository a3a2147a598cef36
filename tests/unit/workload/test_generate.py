"""Generated mixes: the same name and seed are the same load, everywhere and always."""

import pytest

from serving.workload.generate import generate
from serving.workload.trace import TraceError

MIX = "mix:short-behind-long?short=8&long=1.8&seconds=40"


def test_the_same_seed_gives_the_same_trace_and_another_gives_another() -> None:
    """Runs that are compared must have got the same requests."""
    assert generate(MIX, 7) == generate(MIX, 7)
    assert generate(MIX, 7) != generate(MIX, 8)


def test_short_behind_long_has_the_three_kinds_at_their_rates() -> None:
    """The mix is the project's yardstick: a wrong share would move every published figure."""
    requests = generate("mix:short-behind-long?short=8&long=2&seconds=400", 1).requests
    short = [r for r in requests if r.prompt_tokens <= 100]
    long = [r for r in requests if r.prompt_tokens >= 3000]
    batch = [r for r in requests if r.tier == "flex"]
    assert len(requests) == len(short) + len(long) + len(batch)
    assert len(short) / 400 == pytest.approx(8, rel=0.1)
    assert len(long) / 400 == pytest.approx(2, rel=0.15)
    assert len(batch) == 8 * 40
    assert {r.arrival for r in batch} == {1.0 + 10 * i for i in range(40)}
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)


def test_a_burst_is_denser_than_what_lies_between() -> None:
    """Without the bursts the trace would not show what happens in one."""
    requests = generate("mix:steady-burst?rate=5&burst=50&every=20&lasts=3&seconds=200", 3).requests
    inside = sum((r.arrival - 10) % 20 < 3 for r in requests) / 30
    outside = sum((r.arrival - 10) % 20 >= 3 for r in requests) / 170
    assert inside == pytest.approx(55, rel=0.15)
    assert outside == pytest.approx(5, rel=0.15)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mix:chaos", "got mix 'chaos', expected one of short-behind-long, steady-burst"),
        ("mix:steady-burst?rats=5", "got parameter 'rats', expected one of seconds, rate"),
        ("mix:steady-burst?rate=fast", "rate: got 'fast', expected a number from 0 to 10000"),
        ("mix:steady-burst?seconds=nan", "seconds: got 'nan'"),
        ("mix:steady-burst?rate=0&burst=0", "gives no request"),
    ],
)
def test_a_wrong_mix_is_refused_with_what_was_expected(name: str, expected: str) -> None:
    """A misspelt parameter that falls back to its default benchmarks something else."""
    with pytest.raises(TraceError, match=expected):
        generate(name, 1)
