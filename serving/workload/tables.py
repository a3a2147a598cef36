"""The tables that a person reads in the terminal: one run lane by lane, or runs side by side."""

import math
from collections.abc import Sequence

from rich.table import Table

from serving.workload.compare import Comparison, StartBar
from serving.workload.record import Run
from serving.workload.summary import ALL_LENGTHS, Group, refused_or_failed

MISSING = "–"


def milliseconds(value: float | None) -> str:
    """Seconds as text in ms; ∞ for +∞, a dash for None."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "∞"
    return f"{value * 1000:.1f}" if value < 0.1 else f"{value * 1000:,.0f}"


def duration(value: float) -> str:
    """Seconds as a person says them: `100 ms`, `1 s`, `10 min`."""
    if value < 1:
        return f"{value * 1000:g} ms"
    return f"{value:g} s" if value < 120 else f"{value / 60:g} min"


def percent(value: float | None) -> str:
    """A share as text in %, cut and not rounded, so that 100 % means all."""
    return MISSING if value is None else f"{math.floor(value * 1000 + 1e-9) / 10:.1f} %"


def population(run: Run) -> str:
    """What the figures of a run are about: boundary, window, population."""
    counts = "latency from the schedule" if run.boundary == "client" else "latency from receipt"
    return (
        f"boundary {run.boundary}, {counts}; window {run.window:.1f} s, last answer after {run.elapsed:.1f} s; "
        f"population: every valid request of the lane, no first token = ∞ "
        f"({run.offered} offered, {run.completed} completed)"
    )


def trust(run: Run) -> str:
    """One line on whether to believe the run."""
    late = run.send_lateness
    sent = (
        f"sent late by p50 {late.p50 * 1000:.1f}, p99 {late.p99 * 1000:.1f}, max {late.max * 1000:.1f} ms"
        if late
        else ""
    )
    if run.trusted:
        return sent or "nothing was sent over a network"
    return f"NOT TO BE TRUSTED: {'; '.join(run.distrust)}" + (f" ({sent})" if sent else "")


def run_table(run: Run, groups: Sequence[Group]) -> Table:
    """One run, lane by lane and stratum by stratum. Times in ms."""
    table = Table(title=f"run {run.run_id}: {run.workload.trace} at {run.target}", title_justify="left")
    table.caption = f"{population(run)}\n{trust(run)}"
    table.caption_justify = "left"
    table.add_column("lane / prompt tokens", no_wrap=True)
    for name in (
        "offered", "done", "not served", "TTFT p50", "p95", "p99", "in time", "TPOT p50", "p95",
        "ITL max p99", "whole p50", "p95", "goodput/s", "tok/s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for group in groups:
        whole = group.stratum == ALL_LENGTHS
        table.add_row(
            group.lane if whole else f"  {group.stratum}",
            str(group.offered),
            str(group.completed),
            str(refused_or_failed(group)),
            *(milliseconds(value) for value in (group.ttft.p50, group.ttft.p95, group.ttft.p99)),
            percent(group.ttft_met),
            *(milliseconds(value) for value in (group.tpot.p50, group.tpot.p95, group.itl_max.p99)),
            *(milliseconds(value) for value in (group.completion.p50, group.completion.p95)),
            f"{group.goodput:.2f}",
            f"{group.output_tokens_per_second:.1f}",
            style="bold" if whole else None,
        )
    return table


def compare_table(comparison: Comparison) -> Table:
    """Runs side by side. Times in ms; `×` columns are ratios against the first run."""
    table = Table(title="TTFT, goodput and output, lane by lane", title_justify="left")
    table.caption = (
        "population: every valid request of the lane and stratum, no first token = ∞; × against the first run, "
        "– where runs may not be compared"
    )
    table.caption_justify = "left"
    for name in ("lane", "prompt", "run"):
        table.add_column(name, no_wrap=True)
    columns = ("n", "TTFT p50", "p95", "p99", "p95 ×", "in time", "goodput/s", "×", "tok/s", "×")
    for name in columns:
        table.add_column(name, justify="right")
    for row in comparison.rows:
        for i, (name, cell) in enumerate(zip(comparison.names, row.cells, strict=True)):
            group = cell.group
            figures = (
                [MISSING] * len(columns)
                if group is None
                else [
                    str(group.ttft.count),
                    *(milliseconds(value) for value in (group.ttft.p50, group.ttft.p95, group.ttft.p99)),
                    ratio(cell.ttft_p95_ratio),
                    percent(group.ttft_met),
                    f"{group.goodput:.2f}",
                    ratio(cell.goodput_ratio),
                    f"{group.output_tokens_per_second:.1f}",
                    ratio(cell.output_ratio),
                ]
            )
            last = i == len(row.cells) - 1
            lane, prompt = (row.lane, row.stratum) if i == 0 else ("", "")
            table.add_row(lane, prompt, name, *figures, end_section=last)
    for i, (name, total) in enumerate(zip(comparison.names, comparison.totals, strict=True)):
        table.add_row(
            "all lanes" if i == 0 else "", "", name, str(total.offered), "", "", "", "", "",
            f"{total.goodput:.2f}", ratio(total.goodput_ratio),
            f"{total.output_tokens_per_second:.1f}", ratio(total.output_ratio),
        )  # fmt: skip
    return table


def ratio(value: float | None) -> str:
    """A ratio as text."""
    return MISSING if value is None else "∞" if math.isinf(value) else f"{value:.2f}"


def start_line(bar: StartBar) -> str:
    """Whether a shadow rollout may start, in words."""
    where = f"{bar.run}: {bar.lane} median TTFT {milliseconds(bar.median)} ms ({bar.boundary})"
    verdict = "is under" if bar.under else "is NOT under"
    end = "a shadow rollout may start" if bar.under else "no shadow rollout may start"
    return f"{where} {verdict} the bar of {milliseconds(bar.bar)} ms: {end}"
