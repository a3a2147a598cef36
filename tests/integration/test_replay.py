"""`laneway replay` and `laneway compare` as a user runs them, against a simulated replica in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
MIX = "mix:short-behind-long?short=8&long=0.6&burst=3&seconds=6"


def laneway(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(simulated_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "base"
    done = laneway(
        "replay", MIX, "--target", simulated_url, "--out", str(out), "--seed", "3", "--set", "gateway_scheduler=none"
    )
    assert done.returncode in (0, 1), done.stderr
    assert "interactive-short" in done.stdout
    return out


def test_every_scheduled_request_has_one_timeline_and_the_counts_agree(run: Path) -> None:
    """A benchmark that loses requests loses the slow ones."""
    from serving.workload.generate import generate

    record = json.loads((run / "run.json").read_text())
    rows = [json.loads(line) for line in (run / "timelines.jsonl").read_text().splitlines()]
    assert len(rows) == record["offered"] == len(generate(MIX, 3).requests)
    assert record["outcomes"] == {"completed": record["offered"]}
    assert len({row["request_id"] for row in rows}) == len(rows)
    for row in rows:
        stamps = [row[name] for name in ("scheduled", "sent", "first_token", "last_token", "closed")]
        assert stamps == sorted(stamps)
        assert row["received"] is None
        assert row["boundary"] == "client"


def test_prompts_and_outputs_are_as_long_as_the_trace_says(run: Path) -> None:
    """A prompt of another length is in another lane, an answer of another length another load."""
    rows = [json.loads(line) for line in (run / "timelines.jsonl").read_text().splitlines()]
    assert {row["output_tokens"] - row["wanted_output_tokens"] for row in rows} == {0}
    # Without the tokenizer a single short prompt is off by a few tokens, but all together must not lean to one side.
    assert sum(row["usage_prompt_tokens"] for row in rows) == pytest.approx(
        sum(row["prompt_tokens"] for row in rows), rel=0.04
    )
    record = json.loads((run / "run.json").read_text())
    assert record["prompt_token_error"] < 0.12


def test_the_report_is_there_and_holds_no_prompt(run: Path) -> None:
    """What a run leaves behind is passed around."""
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 4
    assert len(page.encode()) < 2_000_000
    assert {path.name for path in run.iterdir()} == {"run.json", "timelines.jsonl", "report.html"}


def test_a_run_can_be_compared_with_its_repetition(run: Path, simulated_url: str, tmp_path: Path) -> None:
    """The same seed must give the same requests, and not the same text: a prefix cache would answer it."""
    again = tmp_path / "again"
    done = laneway(
        "replay", MIX, "--target", simulated_url, "--out", str(again), "--seed", "3", "--set", "gateway_scheduler=x"
    )
    assert done.returncode in (0, 1), done.stderr
    page = tmp_path / "compare.html"
    told = laneway("compare", str(run), str(again), "--json", "--html", str(page))
    assert told.returncode == 0, told.stderr
    comparison = json.loads(told.stdout)
    assert comparison["differences"] == {"gateway_scheduler": ["none", "x"]}
    assert "side by side" in page.read_text()


def test_bad_input_is_told_in_one_line_and_never_half_done(run: Path, simulated_url: str, tmp_path: Path) -> None:
    """At three in the morning a stack trace is not an answer."""
    out = str(tmp_path / "out")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("no-such-file", "--target", simulated_url), 2, "no such file, expected a trace file or mix:NAME"),
        ((MIX, "--target", "localhost"), 2, "--target: got 'localhost', expected a URL"),
        ((MIX, "--target", simulated_url, "--rate", "1", "--speed", "1"), 2, "expected only one of them"),
        ((MIX, "--target", simulated_url, "--model", "gpt-9"), 4, "--model: got 'gpt-9', expected one that"),
        ((MIX, "--target", "http://127.0.0.1:9"), 4, "no answer (ClientConnectorError), expected a server"),
        ((MIX, "--target", simulated_url, "--set", "x"), 2, "--set: got 'x', expected NAME=VALUE"),
        (
            (MIX, "--target", simulated_url, "--key-env", "NO_SUCH_KEY"),
            2,
            "NO_SUCH_KEY is not set, expected the API key",
        ),
    ]
    for arguments, code, expected in cases:
        done = laneway("replay", *arguments, "--out", out)
        assert (done.returncode, expected in done.stderr) == (code, True), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (Path(out) / "run.json").exists()
    taken = laneway("replay", MIX, "--target", simulated_url, "--out", str(run))
    assert taken.returncode == 2
    assert "holds a run already" in taken.stderr


def test_an_interrupted_run_is_kept_and_marked(simulated_url: str, tmp_path: Path) -> None:
    """Ctrl-C after ten minutes must not cost the ten minutes, nor pass for a whole run."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.cli", "replay", "mix:steady-burst?seconds=300", "--target", simulated_url,
         "--out", str(out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors.decode()
    record = json.loads((out / "run.json").read_text())
    assert record["offered"] > 0
    assert record["trusted"] is False
    assert any("stopped" in reason for reason in record["distrust"])


def test_a_recorded_run_can_be_replayed(run: Path, simulated_url: str, tmp_path: Path) -> None:
    """Yesterday's traffic is the best test of today's change."""
    done = laneway(
        "replay", str(run / "timelines.jsonl"), "--target", simulated_url, "--out", str(tmp_path / "out"),
        "--duration", "2", "--json",
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["run"]["workload"]["format"] == "timelines"
    assert told["run"]["offered"] == told["run"]["completed"] > 0
