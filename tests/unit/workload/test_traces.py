"""Recorded traffic must come back as it was recorded, or say where it cannot."""

from pathlib import Path

import orjson
import pytest

from serving.timeline import Boundary, Outcome, Timeline
from serving.workload.readers import detect, open_trace
from serving.workload.trace import Trace, TraceError, TraceRequest, write

FIXTURES = Path(__file__).parents[2] / "fixtures" / "traces"
REAL_DATA = Path(__file__).parents[4] / "shared" / "data"


def read(path: Path, *, skip_bad: bool = False) -> Trace:
    return open_trace(str(path), seed=1, skip_bad=skip_bad, flex_lanes=frozenset({"batch"}))


@pytest.mark.parametrize(
    ("name", "kind"), [("azure_conv.csv", "azure"), ("burstgpt.csv", "burstgpt"), ("mooncake.jsonl", "mooncake")]
)
def test_a_format_is_known_by_its_content(name: str, kind: str) -> None:
    """Otherwise a user must know what their file is called in our words."""
    assert detect(FIXTURES / name) == kind


def test_azure_stamps_keep_their_gaps() -> None:
    """Arrival gaps are what makes a recorded load unlike a synthetic one."""
    trace = read(FIXTURES / "azure_conv.csv")
    assert len(trace.requests) == 12
    assert trace.requests[0] == TraceRequest(arrival=0.0, prompt_tokens=374, output_tokens=44)
    assert trace.requests[1].arrival == pytest.approx(4.314578, abs=1e-5)


def test_a_failed_request_is_replayed_with_the_median_output_and_counted() -> None:
    """Left out, the replay would be lighter than the recording just where it mattered."""
    trace = read(FIXTURES / "burstgpt.csv")
    assert [request.output_tokens for request in trace.requests] == [18, 230, 276, 226, 226]
    assert trace.guessed_outputs == 1
    assert trace.requests[-1].arrival == pytest.approx(209.0)


def test_mooncake_blocks_and_milliseconds_are_read() -> None:
    """Shared prefixes are why these traces exist; a reader that drops them measures a cold cache."""
    trace = read(FIXTURES / "mooncake.jsonl")
    assert trace.requests[1].arrival == pytest.approx(1.94)
    assert trace.requests[4].prefix == (708, 709, 710, 711, 712, 713)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2023-11-16 18:15:46,many,4", r"row 2: ContextTokens: got 'many', expected a whole number of at least 1"),
        ("yesterday,3,4", r"row 2: TIMESTAMP: got 'yesterday', expected a time such as"),
        ("2023-11-16 18:15:46,3", r"row 2: row: got '2023-11-16 18:15:46,3', expected an object or as many fields"),
        ("2023-11-16 18:15:46,0,4", r"row 2: ContextTokens: got '0'"),
        ("2023-11-16 18:15:46,3.5,4", r"row 2: ContextTokens: got '3.5'"),
        ("2023-11-16 18:15:46,inf,4", r"row 2: ContextTokens: got 'inf'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, expected: str) -> None:
    """A user with a million rows must be told which one, and what was wrong with it."""
    file = tmp_path / "trace.csv"
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{text}\n2023-11-16 18:15:47,5,6\n")
    with pytest.raises(TraceError, match=expected):
        read(file)


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    """One bad row in a recording must not cost the recording, nor vanish unseen."""
    file = tmp_path / "trace.jsonl"
    good = b'{"arrival": 1.5, "prompt_tokens": 5, "output_tokens": 6}\n'
    file.write_bytes(good + b'{"arrival": -1, "prompt_tokens": 5, "output_tokens": 6}\n{"arr\n' + good)
    trace = read(file, skip_bad=True)
    assert (len(trace.requests), trace.skipped_rows) == (2, 2)


def test_a_file_of_no_known_form_is_refused(tmp_path: Path) -> None:
    """Guessing a format would replay nonsense."""
    file = tmp_path / "notes.txt"
    file.write_text("hello\n")
    with pytest.raises(TraceError, match=r"the first line is 'hello', expected a header or object"):
        read(file)
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "absent.csv")


def test_our_own_format_comes_back_unchanged(tmp_path: Path) -> None:
    """A trace that was looked at and kept must replay like the one it was made from."""
    requests = (
        TraceRequest(0.25, 100, 7),
        TraceRequest(1.5, 3000, 32, tier="flex", lane="batch", streamed=False, prefix=(4, 5), prefix_block_tokens=256),
    )
    write(Trace("x", "generated", requests), tmp_path / "trace.jsonl")
    assert read(tmp_path / "trace.jsonl").requests == requests


def timeline(number: int, outcome: Outcome, lane: str, output_tokens: int | None) -> dict[str, object]:
    record = Timeline(
        f"r{number}", Boundary.GATEWAY, lane=lane, prompt_tokens=100 + number, output_tokens=output_tokens
    )
    record.received = 50.0 + number
    record.end(outcome, 60.0 + number)
    return record.record()


def test_an_access_log_replays_what_was_offered(tmp_path: Path) -> None:
    """Yesterday's incident is the best benchmark: its refused requests belong to the load, its invalid ones do not."""
    log = tmp_path / "access.jsonl"
    rows: list[dict[str, object]] = [
        timeline(0, Outcome.COMPLETED, "interactive-short", 10),
        {"event": "replica_ready", "replica": "a"},
        timeline(1, Outcome.REJECTED_INVALID, "none", None),
        timeline(2, Outcome.REJECTED_FULL, "interactive-short", None),
        timeline(3, Outcome.COMPLETED, "batch", 90),
    ]
    log.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    trace = read(log)
    assert trace.requests == (
        TraceRequest(0.0, 100, 10, lane="interactive-short"),
        TraceRequest(2.0, 102, 10, lane="interactive-short"),
        TraceRequest(3.0, 103, 90, tier="flex", lane="batch"),
    )
    assert trace.guessed_outputs == 1


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "count"),
    [("azure2023_conv.csv", 19_366), ("azure2023_code.csv", 8_819), ("mooncake_synthetic.jsonl", 3_993)],
)
def test_the_whole_public_files_are_read(name: str, count: int) -> None:
    """An excerpt hides the odd rows; the whole file has them."""
    trace = read(REAL_DATA / name)
    assert (len(trace.requests), trace.skipped_rows) == (count, 0)
    assert trace.requests[0].arrival == 0.0
