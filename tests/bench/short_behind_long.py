"""Short requests behind long ones on real vLLM: gateway lanes against `passthrough` and `static-fifo`.

One vLLM (CPU, tiny random model), pinned to the last core; client and gateway on the others. Every scheduler sees the
same engine process, the same mix and the same seed; prompts are new in each run and prefix caching is off. Rounds are
interleaved and their order turns, so that a drift of the machine's speed does not favour one of them. Prints per lane
the figures of each round, and the ratios against `passthrough` of the same round.

    python -m tests.bench.short_behind_long [--engine vllm] [--rounds 3] [--seconds 120] [--stretch 2.6]
"""

import argparse
import math
import os
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serving import spec as spec_file
from serving.workload import experiment
from serving.workload.record import read_run
from serving.workload.summary import Group, summarize

BASE = "passthrough"


def lane_groups(folder: Path) -> dict[str, Group]:
    """Each lane's figures over all prompt lengths."""
    read = read_run(folder)
    groups = summarize(read.timelines, read.run.lanes, read.run.strata, read.run.window, read.run.elapsed)
    return {group.lane: group for group in groups if group.stratum == "all"}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--long", type=float, default=experiment.Mix().long, help="long prompts a second at stretch 1")
    parser.add_argument("--stretch", type=float, default=None, help="how much slower the engine is; default: measured")
    parser.add_argument("--turn-tokens", type=int, default=512, help="the engine's own chunk bound; 0: none")
    parser.add_argument("--schedulers", default="passthrough,lanes,static-fifo")
    parser.add_argument("--out", type=Path, default=Path("runs/short-behind-long"))
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if options.engine == "vllm" and len(cores) > 1 else None
    setup = experiment.Setup(
        options.engine,
        pools=1,
        seconds=options.seconds,
        out=options.out,
        mix=experiment.Mix(long=options.long),
        turn_tokens=options.turn_tokens,
        engine_core=core,
    )
    options.out.mkdir(parents=True)
    base = spec_file.load(Path("laneway.yaml"))
    schedulers = options.schedulers.split(",")
    found: dict[str, list[dict[str, Group]]] = {name: [] for name in schedulers}
    with experiment.engines(setup) as urls:
        if core is not None:
            os.sched_setaffinity(0, set(cores) - {core})
        stretch = options.stretch or experiment.measure_stretch(urls[0], base.models[0].name)
        spec = options.out / "laneway.yaml"
        experiment.write_spec(base, setup, urls, stretch, spec)
        for number in range(options.rounds):
            turn = number % len(schedulers)
            for name in schedulers[turn:] + schedulers[:turn]:
                folder = options.out / f"{name}-{number + 1}"
                experiment.run(setup, spec, stretch, urls, name, folder, seed=number + 1)
                found[name].append(lane_groups(folder))
    show(found, stretch, options.out)


def show(found: dict[str, list[dict[str, Group]]], stretch: float, out: Path) -> None:
    """The table of rounds and the ratios of each round."""
    console = Console(width=150)
    console.print(f"time stretched ×{stretch:g} (rates, objectives, deadlines); load average {os.getloadavg()}")
    table = Table("lane", "scheduler", "TTFT p50 ms", "p95 ms", "p99 ms", "goodput/s", "output tok/s")
    for lane in found[BASE][0]:
        for name, rounds in found.items():
            groups = [groups[lane] for groups in rounds]
            cells = [
                " ".join(f"{1000 * seconds(getattr(group.ttft, name)):.0f}" for group in groups)
                for name in ("p50", "p95", "p99")
            ]
            cells.append(" ".join(f"{group.goodput:.3f}" for group in groups))
            cells.append(" ".join(f"{group.output_tokens_per_second:.1f}" for group in groups))
            table.add_row(lane, name, *cells)
    console.print(table)
    for name in found:
        if name != BASE:
            console.print(ratios(name, found))


def ratios(name: str, found: dict[str, list[dict[str, Group]]]) -> Table:
    """What `name` does against the base, round by round: median and spread."""
    table = Table(
        "lane", "TTFT p95: base ÷ this", "goodput: this ÷ base", "output tok/s", title=f"{name} against {BASE}"
    )
    pairs = list(zip(found[name], found[BASE], strict=True))

    def row(lane: str, p95: list[float], good: list[float], tokens: list[float]) -> None:
        table.add_row(lane, *(spread(values) for values in (p95, good, tokens)))

    for lane in found[BASE][0]:
        row(
            lane,
            [seconds(base[lane].ttft.p95) / seconds(this[lane].ttft.p95) for this, base in pairs],
            [this[lane].goodput / base[lane].goodput for this, base in pairs if base[lane].goodput],
            [this[lane].output_tokens_per_second / base[lane].output_tokens_per_second for this, base in pairs],
        )

    def total(groups: dict[str, Group], field: str) -> float:
        return float(sum(getattr(group, field) for group in groups.values()))

    row(
        "all lanes",
        [],
        [total(this, "goodput") / total(base, "goodput") for this, base in pairs],
        [total(this, "output_tokens_per_second") / total(base, "output_tokens_per_second") for this, base in pairs],
    )
    return table


def seconds(value: float | None) -> float:
    """A quantile; of nobody, it is no number."""
    return math.nan if value is None else value


def spread(values: list[float]) -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


if __name__ == "__main__":
    main()
