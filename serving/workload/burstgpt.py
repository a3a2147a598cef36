"""Reads BurstGPT traces (CSV: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type).

Origin: BurstGPT (arXiv 2401.17644), CC-BY 4.0. Stamps are seconds from the trace's start. A response of 0 tokens
marks a request that failed where it was recorded: its output length is not known.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.workload.csv_rows import csv_rows
from serving.workload.trace import Rows, Trace, TraceRequest, finish, integer, seconds

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(path: Path, *, skip_bad: bool) -> Trace:
    """The file's requests. Further columns are ignored.

    Raises:
        TraceError: a row is bad (unless they are skipped), or no request is left.
    """
    rows = Rows(str(path), skip_bad=skip_bad)
    requests = list(rows.collect(csv_rows(path, COLUMNS), _request))
    return finish(str(path), "burstgpt", requests, rows.skipped)


def _request(row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival=seconds(row, "Timestamp"),
        prompt_tokens=integer(row, "Request tokens", minimum=1),
        output_tokens=integer(row, "Response tokens", minimum=0) or None,
    )
