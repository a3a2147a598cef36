"""A request's body: parsed, checked, and made ready for the engine.

Fields that the gateway does not know pass through. What a client could forge towards the engine is taken out:
`priority`, and `lane` and `deadline_ms` in `vllm_xargs`, which the gateway sets itself. The engine is sent what was
parsed, written anew, and not the client's bytes: where a field stands twice, readers differ on which of the two counts,
and what was checked here must be what the engine does. That costs what the second figure says; a search of the bytes
for fields that stand twice costs ten times as much.

The JSON codec was chosen by measurement (`python tests/bench/json_codecs.py`; one core of a shared machine, µs to
decode / encode a chat body):

| bytes | orjson | msgspec | json |
|---|---|---|---|
| 1 kB | 1.4 / 1.1 | 1.9 / 1.2 | 6.5 / 7.3 |
| 33 kB | 18 / 24 | 25 / 26 | 71 / 98 |
| 1.1 MB | 620 / 790 | 830 / 840 | 2230 / 3460 |
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from serving.gateway.fields import boolean, integer, kind_of, mapping, number, refused, shown, string
from serving.gateway.prompt import PromptParts, chat_parts, completion_parts, prefix_of
from serving.spec import Spec

MAX_CHOICES = 128
"""Largest `n` of the OpenAI API."""
MAX_TEMPERATURE = 2.0
"""As in the OpenAI API."""
MAX_DEPTH = 254
"""Levels of lists and objects that orjson writes; what is deeper could be read but not passed on."""

_FORGEABLE = ("priority", "vllm_xargs")
_SET_BY_GATEWAY = ("lane", "deadline_ms")
_VARYING = ("tools", "functions", "logprobs", "top_logprobs", "prompt_logprobs", "kv_transfer_params")
"""Fields with which even temperature 0 has no answer that may be kept."""


class Kind(Enum):
    """Which of the two APIs a request speaks."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def path(self) -> str:
        """The same path here and at the engine."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ParsedRequest:
    """A body that was found good; equal only to itself. Its `repr` holds nothing of the prompt."""

    kind: Kind
    model: str
    stream: bool
    include_usage: bool
    """The client itself asked for the usage event of its stream."""
    max_output_tokens: int
    """Most tokens of all its choices together; the spec's default where the request names no limit."""
    service_tier: str | None = field(repr=False)
    user: str | None = field(repr=False)
    prompt: PromptParts = field(repr=False)
    deterministic: bool
    """Temperature 0, one choice, no tools: the same request gets the same answer."""
    prefix: int | None
    body: dict[str, Any] = field(repr=False)
    spliced: bytes = field(repr=False)
    """The body for the engine up to its lane and deadline; `upstream_body` closes it."""

    def upstream_body(self, lane: str, deadline_ms: int) -> bytes:
        """The body for the engine: lane and what is left of the deadline, in milliseconds."""
        return self.spliced + b'"lane":"%b","deadline_ms":%d}}' % (lane.encode(), deadline_ms)


def parse_body(raw: bytes, kind: Kind, spec: Spec) -> ParsedRequest:
    """Parses and checks a body.

    Raises:
        RequestError: `rejected_invalid`; the message names the field, the value's type or size, and what was expected.
    """
    body = _object(raw)
    model = string(body, "model")
    if model is None:
        raise refused("model", "model is missing, expected a string")
    if spec.model(model) is None:
        served = ", ".join(served.name for served in spec.models)
        message = f"model is {shown(model)}, expected one of: {served}"
        raise refused("model", message, code="model_not_found", status=404)
    stream = boolean(body, "stream")
    options = mapping(body, "stream_options")
    if options is not None and not stream:
        raise refused("stream_options", "stream_options is an object, expected none where stream is not true")
    include_usage = options is not None and boolean(options, "include_usage", "stream_options.")
    choices = integer(body, "n", 1, MAX_CHOICES) or 1
    parts = chat_parts(body) if kind is Kind.CHAT else completion_parts(body)
    temperature = number(body, "temperature", 0.0, MAX_TEMPERATURE)
    tier = string(body, "service_tier")
    user = string(body, "user")
    mapping(body, "vllm_xargs")
    return ParsedRequest(
        kind=kind,
        model=model,
        stream=stream,
        include_usage=include_usage,
        max_output_tokens=_max_output(body, kind, spec) * choices * parts.prompts,
        service_tier=tier,
        user=user,
        prompt=parts,
        deterministic=temperature == 0.0
        and choices == 1
        and not parts.media
        and not any(body.get(name) for name in _VARYING),
        prefix=prefix_of(parts),
        body=body,
        spliced=_splice(body, stream),
    )


def _object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; of a field that stands twice the last counts."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise refused(None, f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(body, dict):
        raise refused(None, f"the body is {kind_of(body)}, expected an object")
    return body


def _max_output(body: dict[str, Any], kind: Kind, spec: Spec) -> int:
    limits = spec.gateway.limits
    names = ("max_completion_tokens", "max_tokens") if kind is Kind.CHAT else ("max_tokens",)
    named = [integer(body, name, 1, limits.max_output_tokens) for name in names]
    return next((value for value in named if value is not None), limits.default_output_tokens)


def _splice(body: dict[str, Any], stream: bool) -> bytes:
    """The body but for its end. Every stream is asked for its usage: it is what quotas and estimates are settled by."""
    plain = {key: value for key, value in body.items() if key not in _FORGEABLE}
    if stream:
        plain["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    kept = {key: value for key, value in (body.get("vllm_xargs") or {}).items() if key not in _SET_BY_GATEWAY}
    try:
        head, arguments = orjson.dumps(plain)[:-1], orjson.dumps(kept)[:-1]
    except orjson.JSONEncodeError:
        raise refused(None, f"the body is nested too deep, expected at most {MAX_DEPTH} levels") from None
    return head + b',"vllm_xargs":' + arguments + (b"," if kept else b"")
