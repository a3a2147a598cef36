"""The attribute names of spans and log records, in one list of our own.

Names that a convention has are the convention's; what none names starts with `laneway.`. The published Python
constants of the GenAI conventions are deprecated, so the names stand here, each group with its source. Collector
configuration (redaction's allow-list, sampling keys, span-metric dimensions) is generated from `ATTRIBUTES`.
"""

from collections.abc import Mapping
from types import MappingProxyType

# OpenTelemetry semantic conventions for generative AI (repository semantic-conventions-genai, v0.1.0, Development).
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# OpenTelemetry semantic conventions, stable: HTTP spans, errors, resources.
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"

# Ours: no convention knows lanes, queues or rollouts.
LANE = "laneway.lane"
COHORT = "laneway.cohort"
POOL = "laneway.pool"
REPLICA = "laneway.replica"
OUTCOME = "laneway.outcome"
RUN_ID = "laneway.run_id"
STAGE = "laneway.stage"
REQUEST_ID = "laneway.request_id"
STREAMED = "laneway.streamed"
BATCH_REQUESTS = "laneway.batch.requests"
BATCH_TOKENS = "laneway.batch.tokens"
QUEUE_POSITION = "laneway.queue.position"
ESTIMATED_TOKENS = "laneway.prompt.estimated_tokens"
RETRIES = "laneway.retries"
CACHE = "laneway.cache"
BOUNDARY = "laneway.boundary"
EXEMPLAR = "exemplar"
"""True on a span whose trace a metric's exemplar points at: the collector's tail sampling keeps it."""

PROVIDER = "vllm"
"""Value of `gen_ai.provider.name`. The convention lists hosted providers only and allows others."""

SPAN_ADMISSION = "admission"
SPAN_QUEUE = "queue"
SPAN_DISPATCH = "dispatch"
SPAN_DELIVER = "deliver"
STAGES = (SPAN_ADMISSION, SPAN_QUEUE, SPAN_DISPATCH, SPAN_DELIVER)
"""Names of the gateway's child spans, in the order of time."""

ATTRIBUTES: tuple[str, ...] = (
    GEN_AI_OPERATION_NAME,
    GEN_AI_PROVIDER_NAME,
    GEN_AI_REQUEST_MODEL,
    GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
    ERROR_TYPE,
    LANE,
    COHORT,
    POOL,
    REPLICA,
    OUTCOME,
    RUN_ID,
    STAGE,
    REQUEST_ID,
    STREAMED,
    BATCH_REQUESTS,
    BATCH_TOKENS,
    QUEUE_POSITION,
    ESTIMATED_TOKENS,
    RETRIES,
    CACHE,
    BOUNDARY,
    EXEMPLAR,
)
"""Every attribute that a span of ours may carry. Nothing in it can hold a prompt, a completion or a key."""

EXTRA_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "replica": REPLICA,
        "stage": STAGE,
        "status": HTTP_RESPONSE_STATUS_CODE,
        "max_tokens": GEN_AI_REQUEST_MAX_TOKENS,
        "batch_requests": BATCH_REQUESTS,
        "batch_tokens": BATCH_TOKENS,
        "queue_position": QUEUE_POSITION,
        "estimated_tokens": ESTIMATED_TOKENS,
        "retries": RETRIES,
        "cache": CACHE,
    }
)
"""Keys of `Timeline.extra` that go on the server span and into the access line. Every other key stays behind."""
