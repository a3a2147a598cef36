"""The gateway's rows of a run, picked from its access log: what joins a client's wait to the gateway's stages."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.timeline import Timeline
from serving.workload.access_log import is_record
from serving.workload.trace import json_lines

PATIENCE_SECONDS = 3.0
"""The gateway writes its log from a queue: the last rows come a moment after the answers."""


async def rows_of(log: Path, timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Rows of these requests, as they stand in the log; fewer where the log does not have them (or is not there)."""
    wanted = {timeline.request_id for timeline in timelines}
    patience = time.monotonic() + PATIENCE_SECONDS
    while True:
        rows = _matching(log, wanted)
        if len(rows) >= len(wanted) or time.monotonic() > patience:
            return list(rows.values())
        await asyncio.sleep(PATIENCE_SECONDS / 10)


def _matching(log: Path, wanted: set[str]) -> dict[str, dict[str, Any]]:
    if not log.is_file():
        return {}
    return {
        row["request_id"]: row
        for _, row in json_lines(log)
        if isinstance(row, dict) and is_record(row) and row["request_id"] in wanted
    }
