"""Replicas that the gateway starts: real processes, which must not outlive it."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import typer

from serving.cli import app
from serving.engine import started
from serving.engine.started import StartedReplicas, replica_command
from serving.spec import Model, Pool, Spec, Started, parse
from serving.telemetry.logs import Logs

TEXT = """
lanes: [{name: any, ttft: {seconds: 1}, deadline: 10}]
models: [{name: tiny, max_model_len: 4096, pools: {a: 1}}, {name: big, pools: {b: 1}}]
pools:
  - {name: a, start: {count: %d, first_port: %d}}
  - {name: b, replicas: [{url: "http://127.0.0.1:9000"}]}
"""
SCRIPT = """
import os, signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
def end(*_):
    time.sleep(float(os.environ.get("LINGER", "0")))
    log.write(f"end {sys.argv[2]} {os.getpid()}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "STUBBORN" in os.environ else end)
if "CHILD" in os.environ and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.write(f"child {sys.argv[2]} {os.getpid()}\\n")
    time.sleep(60)
if "DIES" in os.environ:
    time.sleep(0.05)
    sys.exit(7)
log.write(f"start {sys.argv[2]} {os.getpid()}\\n")
time.sleep(60)
"""


def _spec(count: int = 1, port: int = 8100) -> Spec:
    return parse(TEXT % (count, port))


class _Run:
    """Started processes that write down what they do; what they ran as; and the gateway's events."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._file = folder / "did.txt"
        self._events = folder / "events.jsonl"
        self._file.touch()
        self._logs = Logs(self._events, environ={})
        self.replicas = StartedReplicas(self._logs, {"PATH": os.environ["PATH"], **environment})

    def command(self, label: str) -> list[str]:
        """A process that starts in no time."""
        return [sys.executable, "-S", "-E", "-c", SCRIPT, str(self._file), label]

    @property
    def did(self) -> list[tuple[str, str, int]]:
        """(what, label, pid), in order."""
        return [(a, b, int(c)) for a, b, c in (line.split() for line in self._file.read_text().splitlines())]

    async def until(self, *what: str) -> None:
        """The processes have done just this, in any order; fails after five seconds."""
        async with asyncio.timeout(5):
            while sorted(f"{did} {label}" for did, label, _ in self.did) != sorted(what):  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.01)

    async def alive(self) -> list[int]:
        """Those that still run after the moment that a killed process takes to be gone."""
        pids = {pid for _, _, pid in self.did}
        for _ in range(20):
            pids = {pid for pid in pids if _runs(pid)}
            if pids:
                await asyncio.sleep(0.01)
        return sorted(pids)

    def events(self) -> list[dict[str, Any]]:
        """The gateway's events so far; ends its log."""
        self._logs.close()
        return [orjson.loads(line) for line in self._events.read_bytes().splitlines()]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> AsyncIterator[_Run]:
    run = _Run(tmp_path, environment)
    monkeypatch.setattr(started, "replica_command", lambda pool, model, port: run.command(str(port)))
    try:
        yield run
    finally:
        await run.replicas.stop()
        for pid in await run.alive():
            os.kill(pid, signal.SIGKILL)


SETTINGS = {"port": 8100, "name": "org/tiny", "max_num_seqs": 7, "max_num_batched_tokens": 512}
SETTINGS["long_prefill_token_threshold"] = 300


def _pool(**start: Any) -> Pool:
    return Pool(name="a", start=Started(**start), max_num_seqs=7, step_tokens=512, turn_tokens=300)


def _model() -> Model:
    return Model(name="org/tiny", max_model_len=4096, pools={"a": 1})


def _parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    """The command as `laneway` itself reads it: (subcommand, its options)."""
    assert command[:4] == [sys.executable, "-m", "serving.cli", "engine"]
    group: Any = typer.main.get_command(app)
    context = group.commands["engine"].commands[command[4]].make_context(command[4], command[5:])
    return command[4], {**context.params, "rest": context.args}


def test_a_simulated_replica_is_told_the_pool_s_settings() -> None:
    """The gateway would schedule for an engine that is not there: other seats, other steps, another length."""
    kind, options = _parsed(replica_command(_pool(profile="profile.json"), _model(), 8100))
    assert kind == "simulate"
    expected = {
        **SETTINGS,
        "max_model_len": 4096,
        "profile": Path("profile.json"),
        "host": "127.0.0.1",
    }
    assert {name: options[name] for name in expected} == expected


def test_a_real_replica_is_told_the_pool_s_settings_and_its_own_arguments() -> None:
    """The user's arguments would be read as ours, and refused, or ours as vLLM's."""
    pool = _pool(engine="vllm", model_dir="models/x", arguments=("--seed", "1"))
    kind, options = _parsed(replica_command(pool, _model(), 8100))
    assert kind == "vllm"
    expected = {**SETTINGS, "model": "models/x", "rest": ["--seed", "1"]}
    assert {name: options[name] for name in expected} == expected


def test_a_pool_that_no_model_names_is_started_under_its_own_name() -> None:
    """A pool that is prepared for a rollout runs before any model sends traffic to it."""
    assert _parsed(replica_command(_pool(), None, 1))[1]["name"] == "a"


def test_a_pool_that_starts_nothing_has_no_command() -> None:
    """A defect of the caller, told by the field."""
    pool = _spec().pool("b")
    with pytest.raises(ValueError, match=r"pools\.b\.start: null"):
        replica_command(pool, None, 1)


async def test_what_the_spec_wants_runs_and_what_it_no_longer_wants_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaling a pool is an edit of the file."""
    async with _run(tmp_path, monkeypatch) as run:
        urls = run.replicas.set_spec(_spec(2))
        assert urls == {"a": ("http://127.0.0.1:8100", "http://127.0.0.1:8101"), "b": ("http://127.0.0.1:9000",)}
        await run.until("start 8100", "start 8101")
        run.replicas.set_spec(_spec(1))
        await run.until("start 8100", "start 8101", "end 8101")
        run.replicas.set_spec(_spec(1))
        await run.replicas.stop()
        await run.until("start 8100", "start 8101", "end 8101", "end 8100")
        assert await run.alive() == []
        assert [event["event"] for event in run.events()] == ["engine_loading"] * 2, "no fault"


async def test_nothing_that_a_replica_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine core is a child: left behind, it holds the accelerator's memory, and the next start fails."""
    async with _run(tmp_path, monkeypatch, CHILD="1") as run:
        run.replicas.set_spec(_spec())
        await run.until("start 8100", "child 8100")
        await run.replicas.stop()
        assert await run.alive() == []


async def test_a_replica_that_died_leaves_no_child_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, for one that crashed: its successor would find the port and the memory taken."""
    monkeypatch.setattr(started, "RESTART_FIRST_SECONDS", 0.5)
    async with _run(tmp_path, monkeypatch, CHILD="1", DIES="1") as run:
        run.replicas.set_spec(_spec())
        await run.until("child 8100")
        [(_, _, child)] = run.did
        async with asyncio.timeout(0.4):
            while _runs(child):  # noqa: ASYNC110 - a process
                await asyncio.sleep(0.01)


async def test_a_replica_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's own end would wait for it, until somebody kills both."""
    monkeypatch.setattr(started, "STOP_SECONDS", 0.2)
    async with _run(tmp_path, monkeypatch, STUBBORN="1") as run:
        run.replicas.set_spec(_spec())
        await run.until("start 8100")
        async with asyncio.timeout(2):
            await run.replicas.stop()
        assert await run.alive() == []


async def test_a_changed_replica_ends_before_its_successor_takes_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor would fail to bind, and a rollout would begin with a fault and a pause."""
    async with _run(tmp_path, monkeypatch, LINGER="0.3") as run:
        run.replicas.set_spec(_spec())
        await run.until("start 8100")
        for label in ("second", "third"):  # the second is unwanted before it began
            monkeypatch.setattr(started, "replica_command", lambda *_, label=label: run.command(label))
            run.replicas.set_spec(_spec())
        await run.until("start 8100", "end 8100", "start third")
        assert [did for did, _, _ in run.did] == ["start", "end", "start"]


async def test_the_end_of_the_gateway_waits_for_what_is_ending_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica taken out a second before the gateway stops would be left running."""
    async with _run(tmp_path, monkeypatch, LINGER="0.3") as run:
        run.replicas.set_spec(_spec(2))
        await run.until("start 8100", "start 8101")
        run.replicas.set_spec(_spec(1))
        await asyncio.sleep(0)
        await run.replicas.stop()
        assert await run.alive() == []
        assert sorted(label for did, label, _ in run.did if did == "end") == ["8100", "8101"]


async def test_a_replica_that_keeps_ending_is_started_again_ever_more_slowly_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash loop would fill the log and the machine, or nobody would know why the pool is empty."""
    monkeypatch.setattr(started, "RESTART_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(started, "RESTART_MAX_SECONDS", 0.04)
    async with _run(tmp_path, monkeypatch) as run:
        command = [sys.executable, "-S", "-E", "-c", "raise SystemExit(7)"]
        monkeypatch.setattr(started, "replica_command", lambda *_: command)
        run.replicas.set_spec(_spec())
        await asyncio.sleep(0.8)
        await run.replicas.stop()
        events = run.events()
    failures = [event for event in events if event["event"] == "engine_loading_failed"]
    assert {(event["pool"], event["port"], event["exit_code"]) for event in failures} == {("a", 8100, 7)}
    assert len(failures) >= 4
    assert len(events) - len(failures) in (len(failures), len(failures) + 1), "each start is told too"


async def test_a_replica_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine short of processes for a moment would lose the replica for good, without a word."""
    monkeypatch.setattr(started, "RESTART_FIRST_SECONDS", 0.01)
    async with _run(tmp_path, monkeypatch) as run:
        missing = tmp_path / "not-there"
        monkeypatch.setattr(started, "replica_command", lambda *_: [str(missing)])
        run.replicas.set_spec(_spec())
        await asyncio.sleep(0.05)
        missing.write_text(f"#!{sys.executable}\nimport time; time.sleep(60)\n")
        missing.chmod(0o755)
        await asyncio.sleep(0.1)
        await run.replicas.stop()
        events = run.events()
    failures = [event for event in events if event["event"] == "engine_loading_failed"]
    assert [event["exit_code"] for event in failures] == [None] * len(failures)
    pauses = [event["retry_in"] for event in failures]
    assert len(pauses) >= 2
    assert pauses == [pytest.approx(0.01 * 2**i) for i in range(len(pauses))]
    assert events[-1]["event"] == "engine_loading"


async def test_a_replica_that_ends_just_as_it_is_stopped_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that gets lost starts the replica anew, and the gateway never ends: one try in seven hung so."""
    monkeypatch.setattr(started, "RESTART_FIRST_SECONDS", 0.001)
    monkeypatch.setattr(started, "RESTART_MAX_SECONDS", 0.002)
    brief = shutil.which("true")
    for i in range(40):
        async with _run(tmp_path, monkeypatch) as run:
            monkeypatch.setattr(started, "replica_command", lambda *_: [brief])
            run.replicas.set_spec(_spec(4))
            await asyncio.sleep(0.004 + i * 0.0003)
            async with asyncio.timeout(2):
                await run.replicas.stop()
