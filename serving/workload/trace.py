"""A request trace: who arrives when, with how many tokens. Never what they say.

Readers (`azure`, `burstgpt`, `mooncake`, `access_log`) and generators (`generate`) make traces, `replay` and the
simulator use them. Laneway's own format, written by `write`, is JSON lines, one object a request:
`{"arrival": s, "prompt_tokens": n, "output_tokens": n, "tier": "default"|"flex", "lane": name|null,
"streamed": bool, "prefix": [block id, …], "prefix_block_tokens": n}`; all but the first three may be left out.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson

Tier = Literal["default", "flex"]

PREFIX_BLOCK_TOKENS = 512
"""Tokens of one shared block in the Mooncake traces (FAST'25 release), which brought the idea here."""


class TraceError(ValueError):
    """A trace is refused: the file, the row, the field, its value and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds from the trace's start."""
    prompt_tokens: int
    output_tokens: int | None
    """None where the recorded request never got its answer: its length is not known, which is not the same as 0."""
    tier: Tier = "default"
    lane: str | None = None
    """Where the recording gateway put it: a hint, since the replayed gateway decides for itself."""
    streamed: bool = True
    prefix: tuple[int, ...] = ()
    """Blocks of text from the prompt's beginning; equal ids are equal text."""
    prefix_block_tokens: int = PREFIX_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, the first at or after 0 s."""

    source: str
    """The file's name or the generator's address."""
    format: str
    requests: tuple[TraceRequest, ...]
    skipped_rows: int = 0
    guessed_outputs: int = 0
    """Requests whose output length the trace does not know: they were given the median of their tier."""

    @property
    def span(self) -> float:
        """Seconds from 0 to the last arrival."""
        return self.requests[-1].arrival if self.requests else 0.0


class Rows:
    """Reads rows, and says where a bad one stands: raises at the first, or skips and counts them."""

    def __init__(self, source: str, *, skip_bad: bool) -> None:
        self.source = source
        self.skipped = 0
        self._skip_bad = skip_bad

    def collect(self, rows: Iterable[tuple[int, Mapping[str, Any] | str]], parse: Any) -> Iterator[Any]:
        """`parse(row)` of each numbered row; a row that is a text is a fault of the file's own form.

        Raises:
            TraceError: at the first bad row, unless they are skipped.
        """
        for number, row in rows:
            try:
                if isinstance(row, str):
                    raise FieldError("row", row, "an object or as many fields as the header names")
                parsed = parse(row)
            except FieldError as error:
                if not self._skip_bad:
                    hint = "--skip-bad-rows skips such rows"
                    raise TraceError(f"{self.source}: row {number}: {error} ({hint})") from None
                self.skipped += 1
                continue
            if parsed is not None:
                yield parsed


class FieldError(ValueError):
    """One field of a row is wrong."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        shown = repr(value)
        super().__init__(f"{name}: got {shown if len(shown) <= 60 else shown[:57] + '...'}, expected {expected}")


def integer(row: Mapping[str, Any], name: str, *, minimum: int) -> int:
    """A whole number of tokens; texts such as `12` and `12.0` count.

    Raises:
        FieldError: missing, no whole number, or below `minimum`.
    """
    value = row.get(name)
    number = _number(value)
    if number is None or number != int(number) or number < minimum:
        raise FieldError(name, value, f"a whole number of at least {minimum}")
    return int(number)


def seconds(row: Mapping[str, Any], name: str) -> float:
    """A time of at least 0.

    Raises:
        FieldError: missing, no number, negative or not finite.
    """
    value = row.get(name)
    number = _number(value)
    if number is None or number < 0:
        raise FieldError(name, value, "a number of at least 0")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if number - number == 0 else None


def finish(source: str, kind: str, requests: list[TraceRequest], skipped: int, *, origin: float | None = None) -> Trace:
    """Sorts by arrival, counts it from `origin` (None: the first arrival), and fills in what the trace cannot know.

    A recorded request that was refused or failed has no output length. To leave it out would make the replay lighter
    than what was recorded, so it takes the median of the completed requests of its tier.

    Raises:
        TraceError: no request is left, or none has an output length.
    """
    if not requests:
        raise TraceError(f"{source}: holds no request, expected at least one row of format {kind}")
    ordered = sorted(requests, key=lambda request: request.arrival)
    start = ordered[0].arrival if origin is None else origin
    known = [request.output_tokens for request in ordered if request.output_tokens is not None]
    if not known:
        raise TraceError(f"{source}: no request has an output length, expected at least one that was answered")
    medians = {"default": statistics.median_low(known), "flex": statistics.median_low(known)}
    for tier in medians:
        lengths = [r.output_tokens for r in ordered if r.tier == tier and r.output_tokens is not None]
        if lengths:
            medians[tier] = statistics.median_low(lengths)
    filled = [
        replace(
            request,
            arrival=request.arrival - start,
            output_tokens=medians[request.tier] if request.output_tokens is None else request.output_tokens,
        )
        for request in ordered
    ]
    return Trace(source, kind, tuple(filled), skipped, len(ordered) - len(known))


def read_own(path: Path, *, skip_bad: bool) -> Trace:
    """Laneway's own trace format; arrivals are kept as they stand.

    Raises:
        TraceError: see `Rows.collect` and `finish`.
    """
    rows = Rows(str(path), skip_bad=skip_bad)
    requests = list(rows.collect(json_lines(path), _own_request))
    return finish(str(path), "laneway", requests, rows.skipped, origin=0.0)


def _own_request(row: Mapping[str, Any]) -> TraceRequest:
    tier, lane, prefix, streamed = (
        row.get("tier", "default"),
        row.get("lane"),
        row.get("prefix", []),
        row.get("streamed", True),
    )
    if tier not in ("default", "flex"):
        raise FieldError("tier", tier, "default or flex")
    if lane is not None and not isinstance(lane, str):
        raise FieldError("lane", lane, "a lane's name or null")
    if not isinstance(streamed, bool):
        raise FieldError("streamed", streamed, "true or false")
    return TraceRequest(
        arrival=seconds(row, "arrival"),
        prompt_tokens=integer(row, "prompt_tokens", minimum=1),
        output_tokens=integer(row, "output_tokens", minimum=1),
        tier=tier,
        lane=lane,
        streamed=streamed,
        prefix=block_ids("prefix", prefix),
        prefix_block_tokens=integer(
            {"prefix_block_tokens": PREFIX_BLOCK_TOKENS, **row}, "prefix_block_tokens", minimum=1
        ),
    )


def block_ids(name: str, value: object) -> tuple[int, ...]:
    """Ids of shared blocks.

    Raises:
        FieldError: not a list of whole numbers.
    """
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise FieldError(name, value, "a list of whole numbers")
    return tuple(value)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Numbered objects of a JSON-lines file; a line that is no object comes as its text."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield number, row if isinstance(row, dict) else line[:60].decode("utf-8", "replace").strip()


def write(trace: Trace, path: Path) -> None:
    """Writes Laneway's own format, from which `read_own` makes the same requests again."""
    with path.open("wb") as file:
        for request in trace.requests:
            row: dict[str, Any] = {
                "arrival": round(request.arrival, 6),
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
                "tier": request.tier,
                "streamed": request.streamed,
            }
            if request.lane is not None:
                row["lane"] = request.lane
            if request.prefix:
                row |= {"prefix": list(request.prefix), "prefix_block_tokens": request.prefix_block_tokens}
            file.write(orjson.dumps(row) + b"\n")
