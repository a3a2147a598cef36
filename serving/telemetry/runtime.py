"""SDK health, event-loop lag and process figures, sent by OTLP through the collector.

They go another way than the Prometheus metrics on purpose: alerting on requests does not hang on the collector, and
what is said about the exporters is said by the SDK itself.
"""

import os
import time
from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from serving.telemetry import buckets, otlp


class RuntimeMetrics:
    """The meter provider of a process; without OTLP metrics asked for, nothing at all."""

    def __init__(self, service_name: str, environ: Mapping[str, str] = os.environ) -> None:
        """Raises OtlpSettingError if the environment asks for what we do not have."""
        self.provider: MeterProvider | None = None
        self._lag = 0.0
        if not otlp.exported(otlp.Signal.METRICS, environ):
            return
        # The SDK reports its queues and drops only where this is set, and reads it from the process alone.
        os.environ.setdefault(otlp.SDK_METRICS, "true")
        reader = PeriodicExportingMetricReader(otlp.metric_exporter(environ))
        self.provider = MeterProvider([reader], resource=otlp.resource(service_name, environ), shutdown_on_exit=False)
        meter = self.provider.get_meter("laneway")
        self._histogram = meter.create_histogram(
            "laneway.event_loop.lag",
            "s",
            "How late a periodic timer of the event loop fired",
            explicit_bucket_boundaries_advisory=buckets.LOOP_LAG,
        )
        meter.create_observable_counter("process.cpu.time", [_cpu], "s", "CPU seconds used")
        meter.create_observable_gauge("process.memory.usage", [_memory], "By", "Resident memory")

    def loop_lag(self, seconds: float) -> None:
        """How late the event loop's timer fired."""
        if self.provider is not None:
            self._histogram.record(seconds)

    def close(self) -> None:
        """Sends what there is, bounded in time."""
        if self.provider is not None:
            otlp.bounded(self.provider.shutdown, otlp.SHUTDOWN_SECONDS)


def _cpu(options: CallbackOptions) -> Iterable[Observation]:
    used = time.process_time()
    return [Observation(used)]


def _memory(options: CallbackOptions) -> Iterable[Observation]:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return [Observation(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))]
    except OSError:  # not Linux: no figure is better than a wrong one
        return []
