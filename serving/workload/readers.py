"""Opens a trace by whatever name the user gives it: a generator's address, or a file of a known or detected format."""

import csv
from pathlib import Path
from typing import Literal

from serving.workload import access_log, azure, burstgpt, generate, mooncake
from serving.workload.trace import Trace, TraceError, json_lines, read_own

Format = Literal["laneway", "timelines", "azure", "burstgpt", "mooncake"]


def open_trace(
    name: str,
    *,
    seed: int,
    kind: Format | None = None,
    skip_bad: bool = False,
    flex_lanes: frozenset[str] = frozenset(),
) -> Trace:
    """The trace of that name.

    Args:
        name: a file, or `mix:NAME?parameter=value&…` for a generator (`generate.describe()` lists them).
        seed: of a generator; files do not use it.
        kind: the file's format; None detects it from the content.
        skip_bad: skip and count bad rows.
        flex_lanes: lanes whose recorded requests are replayed with `service_tier: flex`.

    Raises:
        TraceError: no such file, format unknown, a row is bad, or no request is left.
    """
    if name.startswith(generate.SCHEME):
        return generate.generate(name, seed)
    path = Path(name)
    if not path.is_file():
        raise TraceError(f"{name}: no such file, expected a trace file or {generate.SCHEME}NAME")
    match kind or detect(path):
        case "azure":
            return azure.read(path, skip_bad=skip_bad)
        case "burstgpt":
            return burstgpt.read(path, skip_bad=skip_bad)
        case "mooncake":
            return mooncake.read(path, skip_bad=skip_bad)
        case "timelines":
            return access_log.read(path, skip_bad=skip_bad, flex_lanes=flex_lanes)
        case "laneway":
            return read_own(path, skip_bad=skip_bad)


def detect(path: Path) -> Format:
    """The format, by a CSV's header or the first JSON object that has the keys of one.

    Raises:
        TraceError: it is none of them.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
    header = {name.strip() for name in next(csv.reader([first]), [])}
    if set(azure.COLUMNS) <= header:
        return "azure"
    if set(burstgpt.COLUMNS) <= header:
        return "burstgpt"
    if first.lstrip().startswith("{"):
        for _, row in json_lines(path):
            if isinstance(row, str):
                continue
            if "arrival" in row:
                return "laneway"
            if "input_length" in row:
                return "mooncake"
            if access_log.is_record(row):
                return "timelines"
    raise TraceError(
        f"{path}: the first line is {first[:60].strip()!r}, expected a header or object of one of the formats "
        "laneway, timelines, azure, burstgpt, mooncake (--format names it)"
    )
