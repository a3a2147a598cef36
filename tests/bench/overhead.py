"""What the gateway adds to the time to first token, beside the proxies that people use, on two cores.

An engine that answers at once and the client run on one core, the proxy under load on the other (every proxy alike).
Rounds are interleaved: direct, then each proxy, then again, at every rate, so that all are measured in the same
minutes; within a round all get the same schedule. "Added" is a quantile of the proxy's run minus the same quantile of
the direct run of that round. Times count from the scheduled moment to the first content byte.

    python -m tests.bench.overhead [--targets laneway,vllm-router] [--rates 20,100,200] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from serving import spec
from tests.bench.measure import Sample, measure, spread
from tests.bench.open_loop import chat_body
from tests.bench.processes import BenchProcess, cores, ready, running
from tests.bench.stub_engine import MODEL
from tests.bench.targets import NAMES, REPOSITORY, START_SECONDS, Target, target

DIRECT = "direct"
SGLANG_NOTE = (
    "sglang-router leaves Nagle's algorithm on: on a warm connection its first token waits for the client's delayed "
    "ACK (40 ms); a client that acknowledges at once (TCP_QUICKACK) has it within about 1 ms."
)
STUB = Path(__file__).with_name("stub_engine.py")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of load: at which target, at what rate, in which round, and how loaded the machine was after it."""

    target: str
    rate: float
    round: int
    sample: Sample
    load_average: float


async def bench(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Run]:
    """Starts everything and measures every target at every rate, round by round."""
    near, far = cores()
    os.sched_setaffinity(0, {near})
    engine_port = arguments.first_port
    stub = [sys.executable, str(STUB), "--port", str(engine_port), "--tokens", str(arguments.tokens)]
    engine = stack.enter_context(running("engine", [*stub, "--gap", str(arguments.gap)], near, folder))
    await ready(engine, f"http://127.0.0.1:{engine_port}/health", START_SECONDS)
    targets: list[tuple[Target, BenchProcess | None]] = [(Target(DIRECT, engine_port, "/health"), None)]
    for number, name in enumerate(arguments.targets):
        goal = target(name, engine_port + 1 + number, engine_port, arguments.environments, folder)
        print(f"starting {name}", file=sys.stderr)
        process = stack.enter_context(running(name, goal.command, far, folder, goal.environment))
        await ready(process, f"http://127.0.0.1:{goal.port}{goal.ready_path}", START_SECONDS)
        targets.append((goal, process))
    body = chat_body(MODEL, arguments.prompt_words, arguments.tokens)
    runs: list[Run] = []
    for turn in range(arguments.rounds):
        for rate in arguments.rates:
            for goal, loaded in targets:
                if rate > goal.most:
                    continue
                print(f"round {turn + 1}: {goal.name} at {rate:g}/s", file=sys.stderr)
                sample = await measure(
                    goal.port, body, arguments.tokens, rate, arguments.seconds, arguments.seed + turn, loaded, goal.key
                )
                runs.append(Run(goal.name, rate, turn, sample, os.getloadavg()[0]))
    return runs


def table_of(runs: list[Run], max_lateness: float) -> Table:
    """Median over rounds, lowest to highest in brackets; milliseconds, client's boundary.

    `max_lateness`: seconds; a run whose requests were sent later than this (p99) says something about the machine, not
    about the target: it is counted, and left out of the quantiles, as is a run whose direct run was one.
    """
    table = Table(
        title="ms from the scheduled moment to the first content byte: median of rounds (lowest to highest)",
        caption=f"late: runs left out of the times because they or their direct run were sent more than "
        f"{max_lateness * 1e3:g} ms late at p99. load: highest load average. {SGLANG_NOTE}",
    )
    for column in ("rate /s", "target"):
        table.add_column(column)
    for column in ("sent", "failed", "late", "TTFT p50", "TTFT p99", "added p50", "added p99", "CPU µs", "load"):
        table.add_column(column, justify="right")
    direct = {(run.rate, run.round): run.sample for run in runs if run.target == DIRECT}
    for rate in sorted({run.rate for run in runs}):
        for name in dict.fromkeys(run.target for run in runs if run.rate == rate):
            mine = [run for run in runs if run.target == name and run.rate == rate]
            pairs = [
                (run.sample, direct[rate, run.round])
                for run in mine
                if max(run.sample.late_p99, direct[rate, run.round].late_p99) <= max_lateness
            ]
            table.add_row(
                f"{rate:g}",
                name,
                str(sum(run.sample.sent for run in mine)),
                str(sum(run.sample.failed for run in mine)),
                str(len(mine) - len(pairs)),
                *(_columns(pairs, with_added=name != DIRECT) if pairs else ("–",) * 5),
                f"{max(run.load_average for run in mine):.2f}",
            )
        table.add_section()
    return table


def _columns(pairs: list[tuple[Sample, Sample]], *, with_added: bool) -> tuple[str, ...]:
    ttft = (spread([own.ttft_p50 * 1e3 for own, _ in pairs]), spread([own.ttft_p99 * 1e3 for own, _ in pairs]))
    if not with_added:
        return (*ttft, "", "", "")
    return (
        *ttft,
        spread([(own.ttft_p50 - direct.ttft_p50) * 1e3 for own, direct in pairs]),
        spread([(own.ttft_p99 - direct.ttft_p99) * 1e3 for own, direct in pairs]),
        f"{statistics.median(own.cpu_per_request for own, _ in pairs) * 1e6:.0f}",
    )


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name!r}, expected any of {', '.join(NAMES)}")
    return names


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}, expected rates above 0")
    return rates


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="What each proxy adds to the time to first token.")
    parser.add_argument("--targets", type=_names, default=list(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rates", type=_rates, default=[20.0, 100.0, 200.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the schedules")
    parser.add_argument("--tokens", type=int, default=16, help="content chunks a stream")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between the engine's tokens; 0: all at once")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--first-port", type=int, default=18400, help="it takes this port and the 40 after it")
    parser.add_argument("--environments", type=Path, default=REPOSITORY / ".bench", help="of the foreign proxies")
    parser.add_argument("--json", action="store_true", help="print every run as JSON instead of the table")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = uvloop.run(bench(arguments, folder, stack))
    if arguments.json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
        return
    Console(width=None if sys.stdout.isatty() else 160).print(
        table_of(runs, spec.load(REPOSITORY / "laneway.yaml").replay.max_send_lateness)
    )
    errors = {f"{run.target} at {run.rate:g}/s": run.sample.errors for run in runs if run.sample.errors}
    for where, what in errors.items():
        print(f"failed: {where}: {what}")


if __name__ == "__main__":
    main()
