"""Runs side by side, lane by lane and stratum by stratum. Pure: folders are read by `record`, written by `commands`.

A difference in prompt lengths alone looks like a difference in speed. So strata are never mixed, and a whole lane's
ratio is only given between runs whose schedules are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from serving.spec import Lane
from serving.timeline import Timeline
from serving.workload.record import Run, RunFolder
from serving.workload.summary import ALL_LENGTHS, Group, quantile, stratum_names, summarize, ttft_population


@dataclass(frozen=True, slots=True)
class Cell:
    """One run's figures of a row."""

    group: Group | None
    """None: the run has no request there."""
    ttft_p95_ratio: float | None
    """This run's TTFT p95 over the first run's; below 1 is better. None where they may not be compared."""
    goodput_ratio: float | None
    """Above 1 is better."""
    output_ratio: float | None
    """Of output tokens a second; above 1 is better."""


@dataclass(frozen=True, slots=True)
class Row:
    """One lane and stratum in every run."""

    lane: str
    stratum: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class StartBar:
    """Whether a run's gated lane is fast enough to start a shadow rollout."""

    run: str
    lane: str
    median: float | None
    """TTFT, seconds, of everybody in the population; None without requests."""
    bar: float
    """`rollout.start_median` of the run's spec, seconds."""
    under: bool
    boundary: str


@dataclass(frozen=True, slots=True)
class Total:
    """All lanes of a run together. No latencies: these would mix lanes."""

    offered: int
    completed: int
    goodput: float
    goodput_ratio: float | None
    output_tokens_per_second: float
    output_ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that can be said of these runs together."""

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    totals: tuple[Total, ...]
    differences: dict[str, tuple[str, ...]]
    """Settings that differ, each with its value in every run."""
    warnings: tuple[str, ...]
    start: tuple[StartBar, ...]


def settings_of(run: Run) -> dict[str, str]:
    """Everything about a run that could change its figures, by name."""
    work = run.workload
    return {
        **run.settings,
        "requests": work.sha256[:12],
        "model": work.model,
        "ignore_eos": str(work.ignore_eos).lower(),
        "boundary": str(run.boundary),
        "objectives": _objectives(run),
    }


def _objectives(run: Run) -> str:
    parts = [f"{lane.name} {lane.ttft.seconds:g}/{lane.tpot.seconds if lane.tpot else 'none'}" for lane in run.lanes]
    return ", ".join(parts) + f"; strata {list(run.strata.prompt_tokens)}"


def differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Settings that are not the same in every run; one that a run does not name is `not given`.

    The spec's digest counts only where no setting tells what differs in it: one switch in the spec is one difference.
    """
    given = [settings_of(run) for run in runs]
    names = list(dict.fromkeys(name for settings in given for name in settings))
    values = {name: tuple(settings.get(name, "not given") for settings in given) for name in names}
    differing = {name: value for name, value in values.items() if len(set(value)) > 1}
    digests = tuple(run.spec_digest or "unknown" for run in runs)
    if not differing and len(set(digests)) > 1:
        differing["spec"] = digests
    return differing


def compare(folders: Sequence[RunFolder]) -> Comparison:
    """The comparison; ratios are against the first run.

    Raises:
        ValueError: fewer than two runs, or a run holds a request without an outcome or of an unknown lane.
    """
    if len(folders) < 2:
        raise ValueError(f"got {len(folders)} run(s), expected at least two")
    runs = [folder.run for folder in folders]
    names = _names(folders)
    by_run = [
        {(g.lane, g.stratum): g for g in summarize(f.timelines, f.run.lanes, f.run.strata, f.run.window, f.run.elapsed)}
        for f in folders
    ]
    keys = _ordered(by_run, stratum_names(runs[0].strata.prompt_tokens))
    alike = [_alike(runs[0], run) for run in runs]
    rows = tuple(
        Row(lane, stratum, tuple(
            _cell(by_run[0].get((lane, stratum)), groups.get((lane, stratum)), likeness, stratum)
            for groups, likeness in zip(by_run, alike, strict=True)
        ))
        for lane, stratum in keys
    )  # fmt: skip
    differing = differences(runs)
    return Comparison(
        names=names,
        rows=rows,
        totals=tuple(_total(by_run[0], groups, likeness) for groups, likeness in zip(by_run, alike, strict=True)),
        differences=differing,
        warnings=tuple(_warnings(names, runs, differing, rows)),
        start=tuple(bar for name, folder in zip(names, folders, strict=True) for bar in start_bars(name, folder)),
    )


def start_bars(name: str, folder: RunFolder) -> list[StartBar]:
    """The bar for each gated lane of a run."""
    run = folder.run
    return [_start_bar(name, run, lane, folder.timelines) for lane in run.lanes if lane.gate]


def _start_bar(name: str, run: Run, lane: Lane, timelines: Sequence[Timeline]) -> StartBar:
    waits = sorted(ttft_population([timeline for timeline in timelines if timeline.lane == lane.name], lane))
    median = quantile(waits, 0.5)
    under = median is not None and median < run.start_median
    return StartBar(name, lane.name, median, run.start_median, under, str(run.boundary))


def _names(folders: Sequence[RunFolder]) -> tuple[str, ...]:
    """The folders' names, in full where two are the same."""
    short = [folder.path.resolve().name for folder in folders]
    return tuple(short) if len(set(short)) == len(short) else tuple(str(folder.path) for folder in folders)


def _ordered(by_run: Sequence[dict[tuple[str, str], Group]], strata: Sequence[str]) -> list[tuple[str, str]]:
    """Every lane that any run has, each with its strata, shortest prompts first."""
    keys = list(dict.fromkeys(key for groups in by_run for key in groups))
    lanes = list(dict.fromkeys(lane for lane, _ in keys))
    order = {name: i for i, name in enumerate((ALL_LENGTHS, *strata))}
    return sorted(keys, key=lambda key: (lanes.index(key[0]), order.get(key[1], len(order))))


class _Likeness(IntEnum):
    """How far two runs may be compared."""

    NONE = 0
    """They were measured or judged differently."""
    STRATA = 1
    """They got other requests: only latencies inside a stratum."""
    WHOLE = 2
    """They got the same requests."""


def _alike(first: Run, other: Run) -> _Likeness:
    if _objectives(first) != _objectives(other) or first.boundary != other.boundary:
        return _Likeness.NONE
    return _Likeness.WHOLE if first.workload.sha256 == other.workload.sha256 else _Likeness.STRATA


def _cell(first: Group | None, group: Group | None, alike: _Likeness, stratum: str) -> Cell:
    if first is None or group is None or alike is _Likeness.NONE:
        return Cell(group, None, None, None)
    whole = alike is _Likeness.WHOLE
    return Cell(
        group,
        _ratio(group.ttft.p95, first.ttft.p95) if whole or stratum != ALL_LENGTHS else None,
        # More requests offered give more goodput and more tokens: no ratio between different loads.
        _ratio(group.goodput, first.goodput) if whole else None,
        _ratio(group.output_tokens_per_second, first.output_tokens_per_second) if whole else None,
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    if value is None or base is None or base == 0 or math.isinf(base):
        return None
    return value / base


def _total(first: dict[tuple[str, str], Group], groups: dict[tuple[str, str], Group], alike: _Likeness) -> Total:
    base = [group for group in first.values() if group.stratum == ALL_LENGTHS]
    lanes = [group for group in groups.values() if group.stratum == ALL_LENGTHS]
    goodput = sum(group.goodput for group in lanes)
    output = sum(group.output_tokens_per_second for group in lanes)
    whole = alike is _Likeness.WHOLE
    return Total(
        offered=sum(group.offered for group in lanes),
        completed=sum(group.completed for group in lanes),
        goodput=goodput,
        goodput_ratio=_ratio(goodput, sum(group.goodput for group in base)) if whole else None,
        output_tokens_per_second=output,
        output_ratio=_ratio(output, sum(group.output_tokens_per_second for group in base)) if whole else None,
    )


def _warnings(
    names: Sequence[str], runs: Sequence[Run], differing: dict[str, tuple[str, ...]], rows: Sequence[Row]
) -> list[str]:
    warnings = [
        f"{name} is not to be trusted: {'; '.join(run.distrust)}"
        for name, run in zip(names, runs, strict=True)
        if not run.trusted
    ]
    if len(differing) > 1:
        warnings.append(
            f"the runs differ in {len(differing)} settings ({', '.join(differing)}): "
            "what changed cannot be put down to one of them"
        )
    if len({run.workload.sha256 for run in runs}) > 1:
        warnings.append("the runs did not get the same requests: only latencies inside a stratum are compared")
    if len({str(run.boundary) for run in runs}) > 1 or len({_objectives(run) for run in runs}) > 1:
        warnings.append("boundaries, objectives or strata differ: such runs have no ratios")
    moved = [
        f"{row.lane} {row.stratum}"
        for row in rows
        if row.stratum != ALL_LENGTHS and len({cell.group.offered if cell.group else 0 for cell in row.cells}) > 1
    ]
    if moved and len({run.workload.sha256 for run in runs}) == 1:
        warnings.append(f"the same requests were not all put into the same lanes or sent ({', '.join(moved)})")
    return warnings
