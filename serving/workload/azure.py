"""Reads the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; 2023 and 2024 releases).

Origin: Azure Public Dataset, CC-BY 4.0. Stamps are wall clock with up to seven decimals, with or without an offset.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.workload.csv_rows import csv_rows
from serving.workload.trace import FieldError, Rows, Trace, TraceRequest, finish, integer

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, *, skip_bad: bool) -> Trace:
    """The file's requests.

    Raises:
        TraceError: a row is bad (unless they are skipped), or no request is left.
    """
    rows = Rows(str(path), skip_bad=skip_bad)
    requests = list(rows.collect(csv_rows(path, COLUMNS), _request))
    return finish(str(path), "azure", requests, rows.skipped)


def _request(row: Mapping[str, Any]) -> TraceRequest:
    text = row["TIMESTAMP"]
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError:
        raise FieldError("TIMESTAMP", text, "a time such as 2023-11-16 18:15:46.6805900") from None
    if stamp.tzinfo is None:
        stamp = stamp.replace(tzinfo=UTC)
    return TraceRequest(
        arrival=stamp.timestamp(),
        prompt_tokens=integer(row, "ContextTokens", minimum=1),
        output_tokens=integer(row, "GeneratedTokens", minimum=0) or None,
    )
