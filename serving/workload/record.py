"""A run's folder: `run.json` and `timelines.jsonl`, written once and read back with their faults named."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from serving.spec import Lane, Strata
from serving.timeline import Boundary, Timeline
from serving.workload.access_log import read_timelines
from serving.workload.trace import TraceError

RUN_FILE, TIMELINES_FILE, GATEWAY_FILE, REPORT_FILE = "run.json", "timelines.jsonl", "gateway.jsonl", "report.html"


class RunError(ValueError):
    """A run's folder cannot be read or written."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Workload(_Part):
    """What was sent. Runs whose workloads are equal sent the same requests at the same times."""

    trace: str
    format: str
    sha256: str
    """Of the shaped requests: arrival, lengths, tier, blocks."""
    seed: int
    rate: float | None
    speed: float | None
    duration: float | None
    max_output: int | None
    max_prompt: int | None
    max_total: int | None
    unstreamed: float
    ignore_eos: bool
    model: str
    skipped_rows: int = 0
    guessed_outputs: int = 0
    capped_prompts: int = 0
    capped_outputs: int = 0


class Lateness(_Part):
    """sent − scheduled, less the time to open a connection; seconds."""

    p50: float
    p99: float
    max: float


class Run(_Part):
    """`run.json`. It holds the objectives it is judged by, so that a later spec does not change an old run."""

    run_id: str
    boundary: Boundary
    started_at: str
    """UTC, ISO 8601."""
    software: dict[str, str]
    spec_digest: str | None
    """Of the gateway where it told, else null."""
    objectives_digest: str
    """Of the spec that lanes, strata and `start_median` below come from."""
    lanes: tuple[Lane, ...]
    strata: Strata
    start_median: float
    target: str
    workload: Workload
    settings: dict[str, str]
    window: float
    """Seconds in which requests were offered."""
    elapsed: float
    """Seconds to the last answer's end."""
    offered: int
    completed: int
    outcomes: dict[str, int]
    send_lateness: Lateness | None
    """None where no request was sent, and in simulations."""
    max_send_lateness: float
    trusted: bool
    distrust: tuple[str, ...]
    """Why the figures are not to be trusted; empty where they are."""
    gateway_rows: int = 0
    """Requests of which the gateway's record was joined."""
    prompt_token_error: float | None = None
    """Median of |prompt tokens by usage less wanted|, relative."""


class RunFolder:
    """A run read back."""

    def __init__(self, path: Path, run: Run, timelines: list[Timeline], gateway: dict[str, Timeline]) -> None:
        self.path = path
        self.run = run
        self.timelines = timelines
        self.gateway = gateway
        """The gateway's records by request id; empty where no access log was given."""


def read_run(path: Path) -> RunFolder:
    """Reads a run's folder.

    Raises:
        RunError: a file is missing or has a fault, which is named.
    """
    file = path / RUN_FILE
    try:
        run = Run.model_validate_json(file.read_bytes())
    except OSError as error:
        raise RunError(f"{file}: cannot be read ({error.strerror}), expected the folder of a run") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RunError(f"{file}: {where}: {fault['msg']}, expected the run.json of a replay or simulation") from None
    gateway_file = path / GATEWAY_FILE
    try:
        timelines = read_timelines(path / TIMELINES_FILE)
        gateway = read_timelines(gateway_file) if gateway_file.exists() else []
    except OSError as error:
        raise RunError(f"{path / TIMELINES_FILE}: cannot be read ({error.strerror})") from None
    except TraceError as error:
        raise RunError(str(error)) from None
    return RunFolder(path, run, timelines, {timeline.request_id: timeline for timeline in gateway})


def make_folder(path: Path) -> None:
    """Makes the folder before the run, so that a run is not lost for want of a place to put it.

    Raises:
        RunError: it holds a run already, or cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out: {path} cannot be made ({error.strerror}), expected a folder") from None
    if (path / RUN_FILE).exists():
        raise RunError(f"--out: {path} holds a run already, expected a new or empty folder")
    if not os.access(path, os.W_OK):
        raise RunError(f"--out: {path} cannot be written, expected a folder of your own")


def write_run(path: Path, run: Run, timelines: Iterable[Timeline], origin: float, gateway: Iterable[Any]) -> None:
    """Writes the folder's data; `run.json` last, so that a folder with one is whole.

    Args:
        origin: the run's start on the timelines' clock; stamps in the file count from it.
        gateway: rows of the gateway's access log, as they stand in it.
    """
    with (path / TIMELINES_FILE).open("wb") as file:
        file.writelines(orjson.dumps(timeline.record(origin)) + b"\n" for timeline in timelines)
    rows = [orjson.dumps(row) + b"\n" for row in gateway]
    if rows:
        (path / GATEWAY_FILE).write_bytes(b"".join(rows))
    (path / RUN_FILE).write_text(run.model_dump_json(indent=2) + "\n", encoding="utf-8")
