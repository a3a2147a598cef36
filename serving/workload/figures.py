"""The pictures of what users waited for: the distribution of TTFT, and TTFT over time with the load under it."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from serving.timeline import Outcome, Timeline
from serving.workload.drawing import (
    LANE_COLOURS,
    MAX_POINTS,
    lanes_of,
    new_figure,
    requests_of,
    styled,
    svg,
    thin,
    time_tick,
)  # fmt: skip
from serving.workload.record import RunFolder
from serving.workload.summary import ttft_population


@styled
def ttft_distribution(folder: RunFolder) -> str:
    """ECDF of TTFT per lane, log axis; who got no first token keeps a curve below 100 %. Objectives are marked."""
    figure = new_figure(3.9)
    axes = figure.add_subplot(xscale="log")
    floor, ceiling = math.inf, 0.0
    for lane, colour in lanes_of(folder.run):
        waits = sorted(ttft_population(requests_of(folder, lane), lane))
        finite = [wait for wait in waits if math.isfinite(wait)]
        if not waits:
            continue
        marks = thin(range(1, len(finite) + 1))
        xs = [max(finite[i - 1], 1e-4) * 1000 for i in marks]
        ys = [100 * i / len(waits) for i in marks]
        if xs:
            axes.step([xs[0], *xs], [0.0, *ys], where="post", color=colour, linewidth=1.8, label=lane.name)
        else:
            axes.plot([], [], color=colour, label=f"{lane.name} (no first token)")
        objective = lane.ttft.seconds * 1000
        axes.axvline(objective, color=colour, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.75)
        axes.plot(
            [objective], [100 * lane.ttft.share], marker="D", markersize=5.5, color="white", markeredgecolor=colour
        )
        floor, ceiling = min([floor, *xs]), max([ceiling, objective, *xs])
    if ceiling:
        axes.set_xlim(min(floor, ceiling / 10) * 0.8, ceiling * 1.4)
    axes.set_ylim(0, 101)
    axes.xaxis.set_major_formatter(FuncFormatter(time_tick))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
    axes.set_xlabel("time to first token")
    axes.set_ylabel("share of the population")
    _legend_above(axes)
    return svg(figure)


@styled
def ttft_over_time(folder: RunFolder) -> str:
    """TTFT of each request at its scheduled time, and below it what was offered and what completed."""
    figure = new_figure(4.9)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    finite = [wait for timeline in folder.timelines if (wait := timeline.ttft) is not None]
    top = max(finite, default=1.0) * 1000 * 2
    lost = False
    for lane, colour in lanes_of(folder.run):
        own = [t for t in requests_of(folder, lane) if t.start is not None]
        seen = _thin_slow([t for t in own if t.ttft is not None])
        upper.plot(
            [t.start or 0.0 for t in seen], [max(t.ttft or 0.0, 1e-4) * 1000 for t in seen],
            ".", markersize=4.5, alpha=0.75, color=colour, label=lane.name, markeredgewidth=0,
        )  # fmt: skip
        unseen = thin([t for t in own if t.ttft is None and t.outcome is not Outcome.COMPLETED])
        lost = lost or bool(unseen)
        upper.plot([t.start or 0.0 for t in unseen], [top] * len(unseen), "x", markersize=5, color=colour)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(FuncFormatter(time_tick))
    upper.yaxis.set_minor_formatter(NullFormatter())
    upper.set_ylabel("time to first token" + ("\n(×: none)" if lost else ""))
    _legend_above(upper)
    _load(lower, folder)
    return svg(figure)


def _load(axes: Axes, folder: RunFolder) -> None:
    end = max(folder.run.elapsed, folder.run.window, 1.0)
    width = max(1.0, end / 60)
    bins = max(1, math.ceil(end / width))
    edges = [i * width for i in range(bins + 1)]
    offered = _binned([t.start for t in folder.timelines], width, bins)
    done = _binned([t.closed for t in folder.timelines if t.outcome is Outcome.COMPLETED], width, bins)
    axes.stairs(offered, edges, color="#3a4450", linewidth=1.4, label="offered")
    axes.stairs(done, edges, color="#009e73", linewidth=1.4, fill=True, alpha=0.35, label="completed")
    axes.set_ylabel("requests/s")
    axes.set_xlabel("seconds from the run's start")
    axes.set_xlim(0, end)
    axes.set_ylim(0, max([1.0, *offered, *done]) * 1.3)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.legend(loc="upper right", ncols=2)


def _legend_above(axes: Axes) -> None:
    """Where it never lies on the data."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(LANE_COLOURS), borderaxespad=0.2, markerscale=2
        )


def _thin_slow(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Evenly spaced requests, and the slowest ones besides: a thinned cloud must not lose its worst points."""
    worst = sorted(timelines, key=lambda timeline: timeline.ttft or 0.0)[-MAX_POINTS // 8 :]
    return [*thin(timelines), *worst] if len(timelines) > MAX_POINTS else list(timelines)


def _binned(stamps: Sequence[float | None], width: float, bins: int) -> list[float]:
    counts = [0.0] * bins
    for stamp in stamps:
        if stamp is not None and stamp >= 0:
            counts[min(bins - 1, int(stamp / width))] += 1 / width
    return counts
