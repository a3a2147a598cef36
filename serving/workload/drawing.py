"""How every picture of a report looks: one style, one palette, SVG that stands inside a page."""

import io
from collections.abc import Sequence
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from serving.spec import Lane
from serving.timeline import Timeline
from serving.workload.record import Run, RunFolder

T = TypeVar("T")

LANE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#7a6a00", "#56b4e9")
"""Told apart by colour-blind readers too (after Okabe and Ito), dark enough on white."""
MAX_POINTS = 400
"""Of one curve or cloud: a report stays small and a screen shows no more."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "laneway",
    "text.parse_math": False,  # an id with a $ in it is no formula
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Segoe UI", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a0",
    "axes.labelcolor": "#3a4450",
    "xtick.color": "#3a4450",
    "ytick.color": "#3a4450",
    "axes.grid": True,
    "grid.color": "#e4e8ec",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
WIDTH = 9.4


styled = mpl.rc_context(STYLE)
"""Decorates what draws: matplotlib's settings are its own global state, and hold only while a picture is made."""


def lanes_of(run: Run) -> list[tuple[Lane, str]]:
    """Each lane with its colour."""
    return [(lane, LANE_COLOURS[i % len(LANE_COLOURS)]) for i, lane in enumerate(run.lanes)]


def requests_of(folder: RunFolder, lane: Lane) -> list[Timeline]:
    """The lane's requests."""
    return [timeline for timeline in folder.timelines if timeline.lane == lane.name]


def thin(items: Sequence[T]) -> list[T]:
    """Evenly spaced items, the last one always among them."""
    if len(items) <= MAX_POINTS:
        return list(items)
    step = (len(items) - 1) / (MAX_POINTS - 1)
    return [items[round(i * step)] for i in range(MAX_POINTS)]


def time_tick(value: float, _: float) -> str:
    """A tick of a time axis in ms, in the unit that a person would say."""
    if value >= 60_000 and value % 60_000 == 0:
        return f"{value / 60_000:g} min"
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def new_figure(height: float) -> Figure:
    """An empty figure of the page's width; `height` in inches of 72 points."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element, with text as text."""
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
