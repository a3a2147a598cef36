"""The pages: a run's `report.html` and the comparison of runs. Self-contained: they open without a network."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from serving.workload import drawing, figures, stage_figures, tables
from serving.workload.compare import Comparison, start_bars
from serving.workload.record import RunFolder
from serving.workload.summary import ALL_LENGTHS, Group, refused_or_failed, summarize

MAX_BYTES = 2_000_000
"""A report must stay below it, so that it can be sent by mail."""


def run_page(folder: RunFolder) -> str:
    """The report of one run.

    Raises:
        ValueError: see `summarize`.
    """
    run = folder.run
    groups = summarize(folder.timelines, run.lanes, run.strata, run.window, run.elapsed)
    lanes = [group for group in groups if group.stratum == ALL_LENGTHS]
    objectives = {lane.name: lane.ttft.share for lane in run.lanes}
    return _page(
        "report.html.j2",
        {
            "run": run,
            "goodput": sum(group.goodput for group in lanes),
            "tokens": sum(group.output_tokens_per_second for group in lanes),
            "rows": [_row(group, objectives[group.lane]) for group in groups],
            "population": tables.population(run),
            "trust": tables.trust(run),
            "start": [{"under": b.under, "text": tables.start_line(b)} for b in start_bars(run.run_id, folder)],
            "distribution": figures.ttft_distribution(folder),
            "over_time": figures.ttft_over_time(folder),
            "thinned": any(len(drawing.requests_of(folder, lane)) > drawing.MAX_POINTS for lane in run.lanes),
            "by_stage": stage_figures.wait_by_stage(folder),
            "joined": len(folder.gateway),
            "slowest": stage_figures.slowest(folder),
            "worst": stage_figures.slowest_requests(folder),
        },
    )


def compare_page(comparison: Comparison) -> str:
    """The comparison as a page."""
    start = [{"under": bar.under, "text": tables.start_line(bar)} for bar in comparison.start]
    return _page("compare.html.j2", {"c": comparison, "start": start})


def _row(group: Group, share: float) -> dict[str, Any]:
    whole = group.stratum == ALL_LENGTHS
    met = group.ttft_met
    return {
        "group": group,
        "whole": whole,
        "name": group.lane if whole else group.stratum,
        "not_served": refused_or_failed(group),
        "mark": "" if met is None or not whole else "good" if met >= share else "bad",
    }


def _page(template: str, values: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("serving.workload"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    tools = {"ms": tables.milliseconds, "percent": tables.percent, "ratio": tables.ratio, "duration": tables.duration}
    return environment.get_template(template).render(**values, **tools)
