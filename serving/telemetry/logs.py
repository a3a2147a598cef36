"""JSON lines: one access line a request (the timeline's schema), and named events with the fields that each may have.

A line is handed to a bounded queue and written by a thread, so that a slow disk or pipe never stands in the event loop;
what does not fit, or cannot be written, is dropped and counted, and the next line is tried all the same. Fields go by
allow-list: nothing that a prompt, an answer or a key could be in is on it. Where the standard `OTEL_*` variables ask
for it, the same lines go out by OTLP.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from enum import Enum
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any, cast

import orjson
from opentelemetry._logs import LogRecord as OtlpRecord
from opentelemetry._logs import SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from serving.telemetry import otlp, semconv
from serving.telemetry.line_file import LineFile
from serving.timeline import Timeline

GATHER_SECONDS = 0.02
"""A line is written so much later at most."""

QUEUE_LINES = 20_000
"""A second's lines at many times the load that one gateway carries; about 20 MB."""


class Event(Enum):
    """What can happen, and the fields that say so."""

    ENGINE_LOADING = ("engine_loading", ("pool", "port"))
    ENGINE_LOADING_FAILED = ("engine_loading_failed", ("pool", "port", "exit_code", "retry_in"))
    REPLICA_JOINED = ("replica_joined", ("pool", "replica"))
    REPLICA_READY = ("replica_ready", ("pool", "replica", "reason"))
    REPLICA_LOST = ("replica_lost", ("pool", "replica", "reason"))
    REPLICA_LEFT = ("replica_left", ("pool", "replica"))
    REQUEST_REFUSED = ("request_refused", ("request_id", "trace_id", "lane", "outcome"))
    REQUEST_CANCELLED = ("request_cancelled", ("request_id", "trace_id", "lane", "outcome"))
    REQUEST_TIMED_OUT = ("request_timed_out", ("request_id", "trace_id", "lane", "outcome"))
    SPEC_CHANGED = ("spec_changed", ("digest",))
    SPEC_REFUSED = ("spec_refused", ("reason",))
    CLIENT_TIMINGS = (
        "client_timings",
        ("request_id", "lane", "client_ttft", "client_total", "gateway_ttft", "region"),
    )
    DRAINING = ("draining", ("requests",))
    DEFECT = ("defect", ("request_id", "error_type", "where"))

    def __init__(self, label: str, fields: tuple[str, ...]) -> None:
        self.label = label
        self.fields = fields


_SEVERITY = {
    Event.DEFECT.label: SeverityNumber.ERROR,
    Event.ENGINE_LOADING_FAILED.label: SeverityNumber.WARN,
    Event.REPLICA_LOST.label: SeverityNumber.WARN,
    Event.SPEC_REFUSED.label: SeverityNumber.WARN,
}
"""OTLP severities of what somebody should look at; all else is INFO."""


class Logs:
    """One process's lines. Methods may be called from the event loop: they only put a line into the queue."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        service_name: str = "laneway-gateway",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`path`: appended to; None writes to standard output.

        Raises:
            OSError: the file cannot be opened.
            OtlpSettingError: the environment asks for what we do not have.
        """
        self._losses = _Losses()
        self._queue: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LINES)
        self._file = LineFile(path)
        self._provider: LoggerProvider | None = None
        handlers: list[logging.Handler] = [_LineHandler(self._file)]
        if otlp.exported(otlp.Signal.LOGS, environ):
            self._provider = LoggerProvider(otlp.resource(service_name, environ), shutdown_on_exit=False)
            self._provider.add_log_record_processor(BatchLogRecordProcessor(otlp.log_exporter(environ)))
            handlers.append(_OtlpHandler(self._provider))
        for handler in handlers:
            handler.handleError = self._losses.add  # type: ignore[method-assign]
        self._handler = _DroppingQueueHandler(self._queue, self._losses)
        self._listener = _Listener(self._queue, *handlers)
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Lines lost since the start: the queue was full, or the write failed."""
        return self._losses.total

    def access(self, timeline: Timeline) -> None:
        """The line of a request that ended. Only the extra keys that `semconv` names go along.

        Costs its caller 20 µs (tests/bench/telemetry_cost.py); the writing is the thread's.
        """
        row = timeline.record()
        for key in timeline.extra:
            if key not in semconv.EXTRA_ATTRIBUTES:
                del row[key]
        self._put({"time": time.time(), "event": "request", **row})

    def event(self, event: Event, **fields: Any) -> None:
        """A named event.

        Raises:
            ValueError: a field that the event does not have.
        """
        if unknown := [name for name in fields if name not in event.fields]:
            raise ValueError(f"{event.label}: got fields {unknown}, expected some of {list(event.fields)}")
        self._put({"time": time.time(), "event": event.label, **fields})

    def defect(self, error: BaseException, request_id: str) -> None:
        """A fault of our own: its type and where it was raised, never its text (which may quote a request)."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = None if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        self.event(Event.DEFECT, request_id=request_id, error_type=type(error).__name__, where=where)

    def close(self, seconds: float = otlp.SHUTDOWN_SECONDS) -> bool:
        """Writes what is queued and ends the thread, within `seconds` (and as long again for OTLP).

        False: some of it was left behind, because a reader or the collector stalls.
        """
        written = otlp.bounded(self._listener.stop, seconds)
        if written:
            self._file.close()
        sent = self._provider is None or otlp.bounded(self._provider.shutdown, seconds)
        return written and sent

    def _put(self, fields: dict[str, Any]) -> None:
        self._handler.handle(logging.LogRecord("laneway", logging.INFO, "", 0, fields, None, None))


class _Losses:
    """Counts lines that were not written, from any thread."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, record: logging.LogRecord) -> None:
        with self._lock:
            self.total += 1


class _DroppingQueueHandler(QueueHandler):
    def __init__(self, waiting: "queue.Queue[logging.LogRecord]", losses: _Losses) -> None:
        super().__init__(waiting)
        self._waiting = waiting
        self._losses = losses

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # the fields are plain values: nothing to be formatted before the thread does

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._losses.add(record)


class _Listener(QueueListener):
    def dequeue(self, block: bool) -> logging.LogRecord:
        # A thread that wakes for every line takes the interpreter from the event loop as often. So lines gather.
        if cast("queue.Queue[Any]", self.queue).empty():
            time.sleep(GATHER_SECONDS)
        return super().dequeue(block)

    def enqueue_sentinel(self) -> None:
        # The end waits for room in a full queue instead of failing there; `close` bounds how long.
        cast("queue.Queue[Any]", self.queue).put(None)


class _ThreadsOwn(logging.Handler):
    """A handler that only the listener's thread calls, and that needs no lock for it: at the interpreter's end
    `logging` takes the lock of every handler, and would wait for ever for one that a stalled write holds."""

    def createLock(self) -> None:  # noqa: N802 - the base class' name
        self.lock = None


class _LineHandler(_ThreadsOwn):
    def __init__(self, file: LineFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(orjson.dumps(record.msg))
        except Exception:  # whatever escaped would end the thread, and with it every later line
            self.handleError(record)


class _OtlpHandler(_ThreadsOwn):
    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._logger = provider.get_logger("laneway")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(cast("dict[str, Any]", record.msg))
        except Exception:
            self.handleError(record)

    def _send(self, row: dict[str, Any]) -> None:
        fields = dict(row)
        trace_id = fields.pop("trace_id", None)
        context = Context()
        if trace_id:
            # The line knows its trace, not which of its spans it is about: 0 is no span.
            parent = SpanContext(int(trace_id, 16), 0, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(parent), context)
        stamp = round(fields.pop("time") * 1e9)
        severity = _SEVERITY.get(fields["event"], SeverityNumber.INFO)
        self._logger.emit(
            OtlpRecord(
                timestamp=stamp,
                observed_timestamp=stamp,
                context=context,
                severity_number=severity,
                severity_text=severity.name,
                body=fields["event"],
                event_name=f"laneway.{fields['event']}",
                attributes={f"laneway.{key}": value for key, value in fields.items() if value is not None},
            )
        )
