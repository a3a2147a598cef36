"""The report: one file that opens anywhere, and says where the time went."""

import re
from pathlib import Path

import pytest

from serving.timeline import Outcome
from serving.workload.compare import compare
from serving.workload.report import MAX_BYTES, compare_page, run_page
from serving.workload.stages import (
    ADMISSION,
    CONNECT,
    DISPATCH,
    END,
    ENGINE,
    NETWORK,
    QUEUE,
    SENT_LATE,
    TOKENS,
    WAIT,
    stages,
)  # fmt: skip
from tests.unit.workload.runs import gateway_row, run_folder, timeline


def test_a_large_run_makes_a_small_page_that_needs_no_network(tmp_path: Path) -> None:
    """A report of an incident is mailed, and opened on a train."""
    lanes = ("interactive-short", "interactive-long", "batch")
    many = [timeline(i, lane=lanes[i % 3], ttft=0.01 + i % 997 / 100, scheduled=i / 500) for i in range(20_000)]
    page = run_page(run_folder(tmp_path / "large", many))
    assert len(page.encode()) < MAX_BYTES
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)", page) == []
    assert "<script" not in page
    assert "@import" not in page


def test_the_page_has_its_four_pictures_and_states_what_it_measured(tmp_path: Path) -> None:
    """A figure without its boundary and population is believed for the wrong thing."""
    lost = [timeline(90 + i, ttft=None, outcome=Outcome.REJECTED_FULL) for i in range(3)]
    page = run_page(run_folder(tmp_path / "run", [*(timeline(i) for i in range(30)), *lost]))
    assert page.count("<svg") == 4
    assert "boundary client" in page
    assert "window 10.0 s" in page
    assert "no first token = ∞" in page
    assert "rejected_full" in page


def test_an_untrusted_run_says_so_at_its_head(tmp_path: Path) -> None:
    """Somebody will only look at the first screen."""
    page = run_page(run_folder(tmp_path / "run", [timeline(1)], distrust=("requests were sent late",)))
    assert page.index("Not to be trusted") < page.index("<table")


@pytest.mark.parametrize("timelines", [[], [timeline(1, ttft=None, outcome=Outcome.NO_REPLICA)]])
def test_a_run_in_which_nothing_worked_has_a_report_too(tmp_path: Path, timelines: list[object]) -> None:
    """The run that failed is the one that is looked at."""
    assert "<svg" in run_page(run_folder(tmp_path / "run", timelines))  # type: ignore[arg-type]


def test_names_from_outside_cannot_break_the_page(tmp_path: Path) -> None:
    """A server chooses the request id that the page shows."""
    evil = timeline(1)
    evil.request_id = "<script>$x"
    page = run_page(run_folder(tmp_path / "run", [evil], settings={"a": "<script>alert(1)</script>"}))
    assert "<script" not in page


def test_the_gateways_record_opens_up_the_clients_wait() -> None:
    """Without it a client only sees that it waited, not where."""
    client = timeline(1, ttft=0.1)
    row = gateway_row(client, queue=0.06)
    from serving.timeline import from_record

    parts = {stage.name: stage.seconds for stage in stages(client, from_record(row))}
    assert list(parts) == [SENT_LATE, NETWORK, ADMISSION, QUEUE, DISPATCH, ENGINE, TOKENS, END]
    assert parts[QUEUE] == pytest.approx(0.06, abs=1e-5)
    assert parts[NETWORK] == pytest.approx(0.1 - 0.001 - 0.072, abs=1e-5)
    before = sum(seconds for name, seconds in parts.items() if name not in (TOKENS, END))
    assert before == pytest.approx(0.1, abs=1e-5)


def test_a_request_that_ended_early_ends_in_the_stage_it_was_in() -> None:
    """A refused request's wait is its whole life; drawn as nothing it would look instant."""
    parts = stages(timeline(1, ttft=None, outcome=Outcome.EXPIRED))
    assert [stage.name for stage in parts] == [SENT_LATE, WAIT]
    assert parts[1].seconds == pytest.approx(0.299)


def test_opening_a_connection_is_not_the_senders_lateness() -> None:
    """A slow handshake blamed on the client would hide a slow server."""
    client = timeline(1)
    client.extra["connect"] = 0.0008
    parts = stages(client)
    assert [stage.name for stage in parts[:2]] == [SENT_LATE, CONNECT]
    assert parts[1].seconds == pytest.approx(0.0008)
    assert parts[0].seconds == pytest.approx(0.0002)


def test_a_comparison_page_names_runs_and_warnings(tmp_path: Path) -> None:
    """The page outlives the terminal that showed the warning."""
    runs = [
        run_folder(tmp_path / "before", [timeline(i) for i in range(9)], settings={"x": "1", "y": "1"}),
        run_folder(tmp_path / "after", [timeline(i) for i in range(9)], settings={"x": "2", "y": "2"}),
    ]
    page = compare_page(compare(runs))
    assert "before" in page
    assert "the runs differ in 2 settings" in page
