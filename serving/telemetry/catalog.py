"""Every metric's name, labels, kind and meaning, as data: what dashboards and alert rules are generated from.

Importing it registers nothing and needs no exporter. Names of the GenAI semantic conventions are written as Prometheus
writes them (dots to underscores, unit at the end). No metric has more than three labels; none has a label that grows
with traffic: models are capped by the spec, replicas too, everything else is an enumeration.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus' metric types, as far as we use them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricDef:
    """One metric family. `name` is the sample's name in a query, so counters end in `_total` and infos in `_info`;
    a histogram's samples are `name` + `_bucket`, `_count`, `_sum`. `unit` is what a panel's axis shows."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str


NO_MODEL = "none"
"""Model label of a request that ended before its model was known."""
OTHER = "other"
"""Label value of what the spec does not name, or names above its caps."""

BASELINE, CONTROL, CANDIDATE = "baseline", "control", "candidate"
COHORTS = (BASELINE, CONTROL, CANDIDATE)

REQUEST = ("model", "lane", "cohort")
ENDED = ("model", "lane", "outcome")
PER_LANE = ("model", "lane")
QUEUE = ("model", "pool", "lane")
REPLICA = ("pool", "replica")


def _histogram(name: str, labels: tuple[str, ...], unit: str, text: str) -> MetricDef:
    return MetricDef(name, Kind.HISTOGRAM, labels, unit, text)


def _counter(name: str, labels: tuple[str, ...], unit: str, text: str) -> MetricDef:
    return MetricDef(name, Kind.COUNTER, labels, unit, text)


def _gauge(name: str, labels: tuple[str, ...], unit: str, text: str) -> MetricDef:
    return MetricDef(name, Kind.GAUGE, labels, unit, text)


def _info(name: str, labels: tuple[str, ...], text: str) -> MetricDef:
    return MetricDef(name, Kind.INFO, labels, "1", text)


# What the user waits for. One observation a request, when it ends.
TTFT = _histogram(
    "gen_ai_server_time_to_first_token_seconds",
    REQUEST,
    "s",
    "Receipt of the head to the first content, of requests that saw one (slo counters hold those that did not)",
)
TPOT = _histogram("gen_ai_server_time_per_output_token_seconds", REQUEST, "s", "Time per output token after the first")
DURATION = _histogram("gen_ai_server_request_duration_seconds", REQUEST, "s", "Receipt of the head to the end")
QUEUE_WAIT = _histogram(
    "laneway_queue_wait_seconds", REQUEST, "s", "Time in the lane's queue, of those that left it for any reason"
)
DISPATCH = _histogram("laneway_dispatch_seconds", REQUEST, "s", "Sent to the replica until its first content")
ITL_MAX = _histogram("laneway_itl_max_seconds", REQUEST, "s", "Longest gap between two contents of a stream")
CLIENT_TTFT = _histogram(
    "laneway_client_ttft_seconds", REQUEST, "s", "Time to the first token shown, as the client reported it"
)
FINE_TTFT = _histogram(
    "laneway_fine_ttft_seconds",
    ("lane", "cohort", "stratum"),
    "s",
    "TTFT objective's population while cohorts are compared; who was not served is in +Inf (so the sum means nothing)",
)

# How requests ended, and whether objectives were met.
REQUESTS = _counter("laneway_requests_total", ENDED, "requests", "Requests by outcome")
COHORT_REQUESTS = _counter(
    "laneway_cohort_requests_total", ("lane", "cohort", "outcome"), "requests", "Requests by cohort and outcome"
)
SLO = _counter(
    "laneway_slo_total",
    ("model", "lane", "objective"),
    "requests",
    "Population of an objective, those that were not served included",
)
SLO_MISSED = _counter(
    "laneway_slo_missed_total", ("model", "lane", "objective"), "requests", "Requests that missed the objective"
)
GOOD = _counter("laneway_good_requests_total", PER_LANE, "requests", "Completed within all objectives of the lane")
PROMPT_TOKENS = _counter("laneway_prompt_tokens_total", PER_LANE, "tokens", "Prompt tokens of requests that ran")
OUTPUT_TOKENS = _counter("laneway_output_tokens_total", PER_LANE, "tokens", "Output tokens")

# Conservation: received = queued + running + the sum of outcomes, per lane, at the instant of the snapshot.
RECEIVED = _counter(
    "laneway_requests_received_total", ("lane",), "requests", "Requests received; in lane none, when they end there"
)
UNCLASSIFIED = _gauge("laneway_requests_unclassified", (), "requests", "Requests whose lane is not known yet")
QUEUED = _gauge("laneway_requests_queued", ("lane",), "requests", "Requests that wait in the gateway")
RUNNING = _gauge("laneway_requests_running", ("lane",), "requests", "Requests that left the queue and have not ended")
DRIFT = _gauge("laneway_conservation_drift", ("lane",), "requests", "Requests unaccounted for; not 0 is a defect")

# The queue of a (model, pool, lane).
QUEUE_TOKENS = _gauge("laneway_queue_tokens", QUEUE, "tokens", "Prompt tokens of queued requests")
QUEUE_OLDEST = _gauge("laneway_queue_oldest_age_seconds", QUEUE, "s", "Age of the oldest queued request")
OLDEST_UNANSWERED = _gauge(
    "laneway_oldest_without_first_token_seconds", QUEUE, "s", "Age of the oldest request that has seen no content"
)
BREACHES = _counter(
    "laneway_wait_limit_breaches_total", QUEUE, "requests", "Requests that queued longer than their wait limit"
)
DRAIN_RATE = _gauge(
    "laneway_drain_rate_tokens_per_second", QUEUE, "tokens/s", "Measured rate at which the queue empties"
)
DEFICIT = _gauge("laneway_lane_deficit_tokens", QUEUE, "tokens", "Tokens that the lane may still release this round")
BUCKET_TOKENS = _gauge("laneway_bucket_tokens", QUEUE, "tokens", "Pending tokens up to the threshold of one batch")
BATCH_REQUESTS = _histogram("laneway_batch_requests", QUEUE, "requests", "Requests of a batch that was released")
BATCH_TOKENS = _histogram("laneway_batch_tokens", QUEUE, "tokens", "Estimated prompt tokens of a released batch")
BATCH_WAIT = _histogram("laneway_batch_wait_seconds", QUEUE, "s", "Queue time of a released batch's oldest request")

# Replicas.
REPLICA_READY = _gauge("laneway_replica_ready", REPLICA, "1", "1: the replica may get requests")
REPLICA_IN_FLIGHT = _gauge("laneway_replica_in_flight", REPLICA, "requests", "Requests of this gateway at the replica")
REPLICA_TOKENS = _gauge(
    "laneway_replica_outstanding_tokens", REPLICA, "tokens", "Prompt tokens sent to the replica and not computed"
)
POOL_READY = _gauge("laneway_pool_ready_replicas", ("pool",), "replicas", "Ready replicas of the pool")
DESIRED = _gauge("laneway_desired_replicas", ("model", "pool"), "replicas", "Replicas that the load needs")
SCALING = _histogram(
    "laneway_scaling_latency_seconds", ("model", "pool"), "s", "Queue age broke its objective until a replica was ready"
)
RETRIES = _counter("laneway_upstream_retries_total", ("pool", "reason"), "requests", "Requests sent to another replica")

# Estimates and the cache of hot prompts.
ESTIMATE_ERROR = _histogram(
    "laneway_token_estimate_error_ratio", ("model",), "1", "|estimated / actual prompt tokens - 1|"
)
BYTES_PER_TOKEN = _gauge("laneway_bytes_per_token", ("model",), "bytes", "Learned bytes of text per prompt token")
CACHE_HITS = _counter("laneway_cache_hits_total", ("model",), "requests", "Answered from the cache")
CACHE_MISSES = _counter("laneway_cache_misses_total", ("model",), "requests", "Cacheable and not in the cache")
CACHE_WOULD_HIT = _counter(
    "laneway_cache_would_hit_total", ("model",), "requests", "Hits that the cache would have had, while it is off"
)
CACHE_BYTES = _gauge("laneway_cache_bytes", (), "bytes", "Size of the cached responses")
CLIENT_TIMINGS = _counter(
    "laneway_client_timings_total", ("result",), "reports", "Client reports by what became of them"
)

# The spec, the build, the process.
WAIT_LIMIT = _gauge("laneway_wait_limit_seconds", ("lane",), "s", "The spec's wait limit")
OBJECTIVE_SECONDS = _gauge("laneway_objective_seconds", ("lane", "objective"), "s", "The spec's latency objectives")
OBJECTIVE_SHARE = _gauge("laneway_objective_ratio", ("lane", "objective"), "1", "Share that must meet the objective")
DEADLINE = _gauge("laneway_deadline_seconds", ("lane",), "s", "The spec's deadline to the first token")
SPEC_INFO = _info("laneway_spec_info", ("digest",), "The spec in force")
BUILD_INFO = _info("laneway_build_info", ("version",), "The running version")
ROLLOUT_INFO = _info("laneway_rollout_info", ("run_id", "stage"), "The rollout that is on, if one is")
LOOP_LAG = _histogram("laneway_event_loop_lag_seconds", (), "s", "How late a periodic timer of the event loop fired")
LOGS_DROPPED = _counter(
    "laneway_log_records_dropped_total", (), "records", "Log records lost: full queue, failed write"
)

METRICS: tuple[MetricDef, ...] = tuple(value for value in list(globals().values()) if isinstance(value, MetricDef))
"""All of them, in the order above."""

OBJECTIVES = ("ttft", "tpot", "success")
"""Values of the label `objective`."""


class RetryReason(StrEnum):
    """Why a request went to another replica."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    SERVER_ERROR = "server_error"
    REFUSED = "refused"


class CacheResult(StrEnum):
    """What the cache had for a request that it may answer."""

    HIT = "hit"
    MISS = "miss"
    WOULD_HIT = "would_hit"


class TimingResult(StrEnum):
    """What became of a client's report."""

    ACCEPTED = "accepted"
    UNKNOWN_REQUEST = "unknown_request"
    REPEATED = "repeated"
    INVALID = "invalid"
