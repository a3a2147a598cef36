"""Reads Mooncake traces (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks).

Origin: Mooncake (FAST'25 release), Apache-2.0. Equal hash ids are equal text, so that an engine's prefix cache meets
what it met where the trace was recorded. Stamps are quantised to 3 s: requests come in clumps.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.workload.trace import (
    FieldError,
    Rows,
    Trace,
    TraceRequest,
    block_ids,
    finish,
    integer,
    json_lines,
    seconds,
)

BLOCK_TOKENS = 512


def read(path: Path, *, skip_bad: bool) -> Trace:
    """The file's requests.

    Raises:
        TraceError: a row is bad (unless they are skipped), or no request is left.
    """
    rows = Rows(str(path), skip_bad=skip_bad)
    requests = list(rows.collect(json_lines(path), _request))
    return finish(str(path), "mooncake", requests, rows.skipped)


def _request(row: Mapping[str, Any]) -> TraceRequest:
    prompt_tokens = integer(row, "input_length", minimum=1)
    blocks = block_ids("hash_ids", row.get("hash_ids", []))
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if len(blocks) > needed:
        raise FieldError("hash_ids", len(blocks), f"at most {needed} blocks for {prompt_tokens} tokens")
    return TraceRequest(
        arrival=seconds(row, "timestamp") / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=integer(row, "output_length", minimum=0) or None,
        prefix=blocks,
        prefix_block_tokens=BLOCK_TOKENS,
    )
