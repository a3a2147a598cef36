"""The log is there when it is needed, holds no secret, and never stands in a request's way."""

import asyncio
import os
import select
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from serving.telemetry import semconv
from serving.telemetry.line_file import ROTATION_SECONDS, LineFile
from serving.telemetry.logs import QUEUE_LINES, Event, Logs
from serving.timeline import Outcome, from_record
from tests.fixtures.otlp_receiver import receiver
from tests.unit.telemetry.timelines import TRACE, ended

CANARY = "canary-secret-5150"


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def until(met: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_access_line_is_the_timeline_and_can_be_read_back(tmp_path: Path) -> None:
    """Lost: replay, diagnosis and comparison from the log that production wrote."""
    logs = Logs(tmp_path / "log", environ={})
    timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=3, trace_id=TRACE)
    timeline.extra["replica"] = "a"
    logs.access(timeline)
    assert logs.close()
    (line,) = lines(tmp_path / "log")
    assert line.pop("event") == "request"
    assert abs(line.pop("time") - time.time()) < 60
    assert from_record(line).record() == timeline.record()


def test_what_is_not_on_the_allow_list_is_not_in_the_log(tmp_path: Path) -> None:
    """Lost: what users wrote, to everybody who may read logs."""
    logs = Logs(tmp_path / "log", environ={})
    timeline = ended(Outcome.REJECTED_INVALID, lane="none")
    timeline.extra |= {"prompt": CANARY, "authorization": CANARY, "messages": [CANARY]}
    logs.access(timeline)
    for event in Event:
        with pytest.raises(ValueError, match="got fields") as caught:
            logs.event(event, prompt=CANARY)
        assert CANARY not in str(caught.value)
    try:
        raise RuntimeError(f"could not parse {CANARY}")
    except RuntimeError as error:
        logs.defect(error, "r1")
    assert logs.close()
    assert CANARY.encode() not in (tmp_path / "log").read_bytes()
    defect = lines(tmp_path / "log")[-1]
    assert defect["error_type"] == "RuntimeError"
    assert defect["where"].startswith("test_logs.py:")


def test_no_event_has_a_field_for_what_users_send() -> None:
    """Lost: the allow-list's meaning, to one careless addition."""
    forbidden = {"prompt", "messages", "content", "completion", "text", "body", "key", "authorization", "headers"}
    for event in Event:
        assert not forbidden & set(event.fields), event.label
    assert not forbidden & set(semconv.EXTRA_ATTRIBUTES)


def test_one_failed_write_loses_one_line_and_not_all_later_ones(tmp_path: Path) -> None:
    """Lost: the log of a whole night, because the disk was full for a second at midnight."""
    logs = Logs(Path("/dev/full"), environ={})
    logs.event(Event.DRAINING, requests=1)
    until(lambda: logs.dropped == 1)
    logs.event(Event.DRAINING, requests=2)
    until(lambda: logs.dropped == 2)
    assert logs.close()
    logs = Logs(tmp_path / "log", environ={})
    logs.event(Event.DRAINING, requests=object())  # not JSON: a defect of ours
    logs.event(Event.DRAINING, requests=3)
    assert logs.close()
    assert [line["requests"] for line in lines(tmp_path / "log")] == [3]
    assert logs.dropped == 1


def test_a_reader_that_stalls_neither_blocks_a_request_nor_the_end(tmp_path: Path) -> None:
    """Lost: the gateway, to a log shipper that hangs. The pipe has a reader that reads nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    logs = Logs(pipe, environ={})
    timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=3)
    longest = 0.0
    for _ in range(QUEUE_LINES + 5000):
        started = time.monotonic()
        logs.access(timeline)
        longest = max(longest, time.monotonic() - started)
    assert logs.dropped > 0
    assert longest < 1.0
    started = time.monotonic()
    assert logs.close(0.2) is False
    assert time.monotonic() - started < 2.0
    # The reader comes back: the writer's thread ends by itself, whole lines only.
    os.set_blocking(reader, True)
    chunks, ends = [], 0
    while ends < QUEUE_LINES + 5000 - logs.dropped and select.select([reader], [], [], 5.0)[0]:
        chunks.append(os.read(reader, 1 << 20))
        ends += chunks[-1].count(b"\n")
    os.close(reader)
    assert ends + logs.dropped == QUEUE_LINES + 5000, "each line was written or counted"
    assert all(orjson.loads(line)["request_id"] == "r1" for line in b"".join(chunks).splitlines())


def test_a_rotated_file_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: every line after logrotate's first night, written to a file that has no name any more."""
    clock = [100.0]
    monkeypatch.setattr("serving.telemetry.line_file.time.monotonic", lambda: clock[0])
    path = tmp_path / "log"
    file = LineFile(path)
    file.write(b"one")
    path.rename(tmp_path / "log.1")
    clock[0] += ROTATION_SECONDS
    file.write(b"two")
    path.unlink()
    path.write_bytes(b"")
    clock[0] += ROTATION_SECONDS
    file.write(b"three")
    file.close()
    assert (tmp_path / "log.1").read_bytes() == b"one\n"
    assert path.read_bytes() == b"three\n"


def test_a_line_after_a_torn_one_starts_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: a good line, glued to the stump that a full disk left."""
    real, left = os.write, [4]

    def full_disk(fd: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        written = real(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    file = LineFile(tmp_path / "log")
    monkeypatch.setattr("serving.telemetry.line_file.os.write", full_disk)
    with pytest.raises(OSError, match="No space"):
        file.write(b"first line")
    left[0] = 1 << 20
    file.write(b"second line")
    file.write(b"third line")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"firs\nsecond line\nthird line\n"


async def test_lines_go_out_by_otlp_tied_to_their_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lost: the way from a trace to its log, where logs are kept by the collector."""
    async with receiver() as received:
        for name, setting in received.environ().items():
            monkeypatch.setenv(name, setting)
        logs = Logs(tmp_path / "log", service_name="laneway-test", environ=received.environ())
        timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=3, trace_id=TRACE)
        timeline.extra["prompt"] = CANARY
        logs.access(timeline)
        logs.event(Event.REPLICA_LOST, pool="baseline", replica="a", reason="stalled")
        assert await asyncio.to_thread(logs.close)
    assert CANARY.encode() not in b"".join(received.raw)
    records = {
        record.event_name: record
        for body in received.raw
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    }
    access = records["laneway.request"]
    assert access.trace_id.hex() == TRACE
    assert {item.key for item in access.attributes} >= {"laneway.request_id", "laneway.lane", "laneway.outcome"}
    assert records["laneway.replica_lost"].severity_text == "WARN"
    assert len(lines(tmp_path / "log")) == 2, "and to the file all the same"


async def test_a_hung_collector_delays_neither_lines_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lost: the local log, to the outage of a remote one."""
    async with receiver(hung=True) as received:
        for name, setting in received.environ().items():
            monkeypatch.setenv(name, setting)
        logs = Logs(tmp_path / "log", environ=received.environ())
        for _ in range(2000):
            logs.event(Event.DRAINING, requests=1)
        await asyncio.to_thread(until, lambda: received.waiting == 1)
        started = time.monotonic()
        assert await asyncio.to_thread(logs.close, 0.5) is False
        assert time.monotonic() - started < 3.0
        assert len(lines(tmp_path / "log")) == 2000
