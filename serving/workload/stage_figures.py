"""The pictures of where the time went: mean wait by stage per lane, and the slowest requests stage by stage."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from serving.spec import Lane
from serving.timeline import Outcome, Timeline
from serving.workload import stages as s
from serving.workload.drawing import lanes_of, new_figure, requests_of, styled, svg, time_tick
from serving.workload.record import RunFolder

STAGE_COLOURS = {
    s.SENT_LATE: "#b3261e",
    s.CONNECT: "#e2a49f",
    s.NETWORK: "#c9b99b",
    s.ADMISSION: "#9aa5b1",
    s.QUEUE: "#e69f00",
    s.DISPATCH: "#56b4e9",
    s.ENGINE: "#0072b2",
    s.WAIT: "#0072b2",
    s.TOKENS: "#009e73",
    s.END: "#c3ccd5",
}
SLOWEST = 10
LEGEND_COLUMNS = 5
"""More would run over the page's edge."""


@styled
def wait_by_stage(folder: RunFolder) -> str:
    """Mean seconds of each stage before the first token, per lane: of all served requests, and of the slowest 5 %.

    Means, because the means of parts add up to the mean of the whole; percentiles do not.
    """
    lanes = [(lane, own) for lane, _ in lanes_of(folder.run) if (own := _served(folder, lane))]
    if not lanes:
        return ""
    figure = new_figure(0.75 + 1.05 * len(lanes))
    used: list[str] = []
    for axes, (lane, own) in zip(figure.subplots(len(lanes), 1, squeeze=False)[:, 0], lanes, strict=True):
        slow = own[-max(1, math.ceil(len(own) / 20)) :]
        for row, group in ((0, own), (1, slow)):
            left = 0.0
            means = _means(folder, group)
            for name in s.ORDER:
                if (value := means.get(name, 0.0) * 1000) <= 0:
                    continue
                axes.barh(row, value, left=left, height=0.62, color=STAGE_COLOURS[name])
                left += value
                used.append(name)
        axes.set_yticks([0, 1], [f"all {len(own)}", f"slowest {len(slow)}"])
        axes.set_title(lane.name, loc="left", fontsize=10, color="#1c2530", fontweight="bold")
        axes.xaxis.set_major_formatter(FuncFormatter(time_tick))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set_xlim(0, None)
    _stage_legend(figure, used)
    return svg(figure)


@styled
def slowest(folder: RunFolder) -> str:
    """The requests that waited longest for their first token (or for their end without one), stage by stage."""
    worst = slowest_requests(folder)
    if not worst:
        return ""
    figure = new_figure(0.9 + 0.34 * len(worst))
    axes = figure.add_subplot()
    used: list[str] = []
    for row, timeline in enumerate(worst):
        left = 0.0
        for stage in s.stages(timeline, folder.gateway.get(timeline.request_id)):
            if stage.seconds > 0:
                axes.barh(row, stage.seconds * 1000, left=left, height=0.66, color=STAGE_COLOURS[stage.name])
                left += stage.seconds * 1000
                used.append(stage.name)
        said = "" if timeline.outcome is Outcome.COMPLETED else f"  {timeline.outcome}"
        if said:
            axes.text(left, row, said, va="center", fontsize=9, color="#b3261e")
    axes.set_yticks(
        range(len(worst)), [f"{t.request_id[:8]}  {t.lane}, {t.prompt_tokens or '?'} tokens" for t in worst], fontsize=9
    )
    axes.xaxis.set_major_formatter(FuncFormatter(time_tick))
    axes.set_xlabel(f"from {'the schedule' if folder.run.boundary == 'client' else 'receipt'}")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    _stage_legend(figure, used)
    return svg(figure)


def slowest_requests(folder: RunFolder) -> list[Timeline]:
    """Ten requests by their wait, longest first."""

    def waited(timeline: Timeline) -> float:
        return timeline.ttft if timeline.ttft is not None else timeline.completion or 0.0

    return sorted(folder.timelines, key=waited, reverse=True)[:SLOWEST]


def _means(folder: RunFolder, group: Sequence[Timeline]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for timeline in group:
        for stage in s.before_first_token(s.stages(timeline, folder.gateway.get(timeline.request_id))):
            totals[stage.name] = totals.get(stage.name, 0.0) + stage.seconds
    return {name: total / len(group) for name, total in totals.items()}


def _served(folder: RunFolder, lane: Lane) -> list[Timeline]:
    """Requests with a first token, quickest first. Once gateway rows are joined, only those that have one."""
    own = [t for t in requests_of(folder, lane) if t.ttft is not None]
    if folder.gateway:
        own = [t for t in own if t.request_id in folder.gateway]
    return sorted(own, key=lambda timeline: timeline.ttft or 0.0)


def _stage_legend(figure: Figure, used: Sequence[str]) -> None:
    names = [name for name in s.ORDER if name in used]
    figure.legend(
        [Patch(color=STAGE_COLOURS[name]) for name in names], names,
        loc="outside upper left", ncols=min(len(names), LEGEND_COLUMNS), handlelength=1.0, columnspacing=1.4,
    )  # fmt: skip
