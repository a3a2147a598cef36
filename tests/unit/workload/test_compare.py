"""Side by side: what may be compared is, what may not be is not."""

from pathlib import Path

import pytest

from serving.timeline import Outcome
from serving.workload.compare import Cell, Comparison, compare
from serving.workload.record import RunError, read_run
from serving.workload.summary import ALL_LENGTHS
from tests.unit.workload.runs import run_folder, timeline

FAST = [timeline(i, ttft=0.05) for i in range(40)]
SLOW = [timeline(i, ttft=0.5) for i in range(40)]


def cell(comparison: Comparison, run: int, stratum: str = ALL_LENGTHS) -> Cell:
    row = next(r for r in comparison.rows if (r.lane, r.stratum) == ("interactive-short", stratum))
    return row.cells[run]


def test_the_same_requests_are_compared_as_a_whole(tmp_path: Path) -> None:
    """This is the sentence that the whole project is about: how much faster, at what goodput."""
    slow = run_folder(tmp_path / "slow", SLOW, settings={"gateway_scheduler": "passthrough"})
    fast = run_folder(tmp_path / "fast", FAST, settings={"gateway_scheduler": "lanes"})
    comparison = compare([slow, fast])
    assert cell(comparison, 1).ttft_p95_ratio == pytest.approx(0.1)
    assert cell(comparison, 1).output_ratio == pytest.approx(1.0)
    assert cell(comparison, 1).goodput_ratio is None  # from 0 to all: no number says that
    assert comparison.differences == {"gateway_scheduler": ("passthrough", "lanes")}
    assert comparison.warnings == ()


def test_other_requests_are_compared_inside_strata_and_by_latency_only(tmp_path: Path) -> None:
    """Shorter prompts look like a faster engine, and more requests like a better goodput."""
    base = run_folder(tmp_path / "base", SLOW)
    other = run_folder(tmp_path / "other", [*FAST, *(timeline(50 + i, prompt=400) for i in range(9))], sha256="b" * 64)
    comparison = compare([base, other])
    assert cell(comparison, 1).ttft_p95_ratio is None
    inside = cell(comparison, 1, "≤128")
    assert inside.ttft_p95_ratio == pytest.approx(0.1)
    assert inside.goodput_ratio is None
    assert comparison.totals[1].goodput_ratio is None
    assert cell(comparison, 0, "≤512").group is None
    assert any("same requests" in warning for warning in comparison.warnings)


@pytest.mark.parametrize(("refused", "ratio"), [(2, 1.0), (3, float("inf"))])
def test_a_request_without_a_first_token_counts_as_missed(tmp_path: Path, refused: int, ratio: float) -> None:
    """Two refused of forty are the 5 % that p95 leaves out; the third one is its value."""
    lost = [timeline(i, ttft=None, outcome=Outcome.REJECTED_FULL) for i in range(refused)]
    comparison = compare([run_folder(tmp_path / "a", FAST), run_folder(tmp_path / "b", [*lost, *FAST[refused:]])])
    assert cell(comparison, 1).ttft_p95_ratio == pytest.approx(ratio)


def test_two_changed_settings_are_called_out(tmp_path: Path) -> None:
    """With two switches turned, nobody knows which one it was."""
    one = run_folder(tmp_path / "a", FAST, settings={"gateway_scheduler": "lanes", "engine_scheduler": "vllm"})
    two = run_folder(tmp_path / "b", FAST, settings={"gateway_scheduler": "passthrough"})
    comparison = compare([one, two])
    assert comparison.differences == {
        "gateway_scheduler": ("lanes", "passthrough"),
        "engine_scheduler": ("vllm", "not given"),
    }
    assert any("differ in 2 settings (gateway_scheduler, engine_scheduler)" in w for w in comparison.warnings)


def test_an_untrusted_run_is_called_out(tmp_path: Path) -> None:
    """A late client measures itself."""
    comparison = compare(
        [run_folder(tmp_path / "a", FAST), run_folder(tmp_path / "b", FAST, distrust=("requests were sent late",))]
    )
    assert "b is not to be trusted: requests were sent late" in comparison.warnings


def test_the_bar_for_a_shadow_rollout_is_the_gated_lanes_median(tmp_path: Path) -> None:
    """A rollout must not start from an average that batch work is part of."""
    batch = [timeline(100 + i, lane="batch", ttft=30.0) for i in range(100)]
    comparison = compare([run_folder(tmp_path / "slow", SLOW), run_folder(tmp_path / "fast", [*FAST, *batch])])
    assert [(bar.run, bar.lane, bar.under) for bar in comparison.start] == [
        ("slow", "interactive-short", False),
        ("fast", "interactive-short", True),
    ]


def test_one_run_alone_or_no_run_at_all_is_refused(tmp_path: Path) -> None:
    """The error must name the folder that is none."""
    with pytest.raises(ValueError, match=r"got 1 run\(s\), expected at least two"):
        compare([run_folder(tmp_path / "a", FAST)])
    with pytest.raises(RunError, match=r"run\.json: cannot be read .* expected the folder of a run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"run_id": "x"}')
    with pytest.raises(RunError, match=r"run\.json: boundary: Field required"):
        read_run(tmp_path)
