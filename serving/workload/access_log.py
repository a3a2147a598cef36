"""Reads Laneway's own records: a gateway's access log, or the `timelines.jsonl` of a run.

What clients never offered as valid load (refused as invalid, unauthorised or over quota) is left out. A log holds
named events between its access lines; lines that are no request's record are passed over.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serving.timeline import NOT_OFFERED, Boundary, Outcome, Timeline, from_record
from serving.workload.trace import FieldError, Rows, Trace, TraceRequest, finish, integer, json_lines


def read(path: Path, *, skip_bad: bool, flex_lanes: frozenset[str] = frozenset()) -> Trace:
    """The recorded requests; those of `flex_lanes` are replayed with the flex tier.

    Raises:
        TraceError: a record is bad (unless they are skipped), or no request is left.
    """
    rows = Rows(str(path), skip_bad=skip_bad)
    requests = list(rows.collect(_records(path), lambda row: _request(row, flex_lanes)))
    return finish(str(path), "timelines", requests, rows.skipped)


def read_timelines(path: Path, *, skip_bad: bool = False) -> list[Timeline]:
    """Every record of a run's `timelines.jsonl` or of an access log.

    Raises:
        TraceError: a record is bad (unless they are skipped).
    """
    return list(Rows(str(path), skip_bad=skip_bad).collect(_records(path), _timeline))


def is_record(row: Mapping[str, Any]) -> bool:
    """Whether a line is a request's record and not a named event."""
    return "request_id" in row and "boundary" in row and "outcome" in row


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    for number, row in json_lines(path):
        if isinstance(row, str) or is_record(row):
            yield number, row


def _timeline(row: Mapping[str, Any]) -> Timeline:
    try:
        return from_record(row)
    except ValueError as error:
        raise FieldError("record", str(error), "a record of the timeline's schema") from None


def _request(row: Mapping[str, Any], flex_lanes: frozenset[str]) -> TraceRequest | None:
    timeline = _timeline(row)
    if timeline.outcome in NOT_OFFERED:
        return None
    start = timeline.start
    if start is None:
        name = "scheduled" if timeline.boundary is Boundary.CLIENT else "received"
        raise FieldError(name, None, "seconds")
    answered = timeline.outcome is Outcome.COMPLETED
    return TraceRequest(
        arrival=start,
        prompt_tokens=integer(row, "prompt_tokens", minimum=1),
        output_tokens=integer(row, "output_tokens", minimum=0) or None if answered else None,
        tier="flex" if timeline.lane in flex_lanes or row.get("tier") == "flex" else "default",
        lane=timeline.lane,
        streamed=timeline.streamed,
    )
