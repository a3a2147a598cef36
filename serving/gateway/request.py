"""A request's body: parsed, checked, and made ready for the engine.

Fields that the gateway does not know pass through unchanged. What a client could forge towards the engine is taken out:
`priority`, and `lane` and `deadline_ms` in `vllm_xargs`, which the gateway sets itself.

The JSON codec was chosen by measurement (one core of a shared machine, µs to decode a chat body of 1 kB / 30 kB /
1 MB): json 13.8 / 221 / 7519, msgspec 6.2 / 103 / 4234, orjson 3.4 / 64 / 2425.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from serving.gateway.errors import RequestError
from serving.spec import Spec
from serving.timeline import Outcome

PREFIX_CHARACTERS = 256
"""Prompts that share this much of their head prefer the same replica; vLLM caches whole blocks of 16 tokens."""

MAX_CHOICES = 128
_FORGEABLE = ("priority", "vllm_xargs")


class Kind(Enum):
    """Which of the two APIs a request speaks."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def path(self) -> str:
        """The same path here and at the engine."""
        return self.value


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What of a prompt can be counted."""

    texts: tuple[str, ...]
    token_ids: int
    """Tokens given as ids: exact."""
    messages: int
    media: int
    """Images, audio and files: their tokens cannot be counted here."""
    tools_bytes: int


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body that was found good."""

    kind: Kind
    model: str
    stream: bool
    include_usage: bool
    """The client itself asked for the usage event of its stream."""
    max_output_tokens: int
    service_tier: str | None
    user: str | None
    prompt: PromptParts
    deterministic: bool
    """Temperature 0, one choice, no tools: the same request gets the same answer."""
    prefix: int | None
    body: dict[str, Any]
    spliced: bytes
    """The body for the engine up to its lane and deadline; `upstream_body` closes it."""

    def upstream_body(self, lane: str, deadline_ms: int) -> bytes:
        """The body for the engine: lane and what is left of the deadline, in milliseconds."""
        return self.spliced + b'"lane":"%b","deadline_ms":%d}}' % (lane.encode(), deadline_ms)


def parse_body(raw: bytes, kind: Kind, spec: Spec) -> ParsedRequest:
    """Parses and checks a body.

    Raises:
        RequestError: `rejected_invalid`; the message names the field, the value's type or size, and what was expected.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _refused(None, f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(body, dict):
        raise _refused(None, f"the body is {_kind_of(body)}, expected an object")
    model = _typed(body, "model", str, "a string")
    if model is None:
        raise _refused("model", "model is missing, expected a string")
    if spec.model(model) is None:
        served = ", ".join(served.name for served in spec.models)
        shown = repr(model[:64])
        raise RequestError(
            Outcome.REJECTED_INVALID,
            f"model is {shown}, expected one of: {served}",
            param="model",
            code="model_not_found",
            status=404,
        )
    stream = bool(_typed(body, "stream", bool, "true or false"))
    options = _typed(body, "stream_options", dict, "an object")
    if options is not None and not stream:
        raise _refused("stream_options", "stream_options is an object, expected none where stream is not true")
    include_usage = bool(options and options.get("include_usage"))
    choices = _integer(body, "n", 1, MAX_CHOICES)
    parts = _chat_parts(body) if kind is Kind.CHAT else _completion_parts(body)
    temperature = _number(body, "temperature", 0.0, 2.0)
    tier = _typed(body, "service_tier", str, "a string")
    user = _typed(body, "user", str, "a string")
    _typed(body, "vllm_xargs", dict, "an object")
    return ParsedRequest(
        kind=kind,
        model=model,
        stream=stream,
        include_usage=include_usage,
        max_output_tokens=_max_output(body, kind, spec),
        service_tier=tier,
        user=user,
        prompt=parts,
        deterministic=temperature == 0.0 and choices in (None, 1) and not _has_tools(body) and not parts.media,
        prefix=_prefix(parts),
        body=body,
        spliced=_splice(raw, body, stream, include_usage),
    )


def _max_output(body: dict[str, Any], kind: Kind, spec: Spec) -> int:
    limits = spec.gateway.limits
    names = ("max_completion_tokens", "max_tokens") if kind is Kind.CHAT else ("max_tokens",)
    for name in names:
        value = _integer(body, name, 1, limits.max_output_tokens)
        if value is not None:
            return value
    return limits.default_output_tokens


def _has_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools") or body.get("functions") or body.get("logprobs") or body.get("prompt_logprobs"))


def _splice(raw: bytes, body: dict[str, Any], stream: bool, include_usage: bool) -> bytes:
    """The body but for its end. The client's own bytes are kept where nothing of theirs has to be taken out."""
    kept: dict[str, Any] = {}
    if (stream and not include_usage and "stream_options" in body) or any(name in body for name in _FORGEABLE):
        plain = {key: value for key, value in body.items() if key not in _FORGEABLE}
        if stream and not include_usage:
            plain["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        kept = {k: v for k, v in (body.get("vllm_xargs") or {}).items() if k not in ("lane", "deadline_ms")}
        head = orjson.dumps(plain)[:-1]
    else:
        head = raw.rstrip()[:-1]
        if stream and not include_usage:
            head += b',"stream_options":{"include_usage":true}'
    arguments = orjson.dumps(kept)[:-1]
    return head + b',"vllm_xargs":' + arguments + (b"," if kept else b"")


def _chat_parts(body: dict[str, Any]) -> PromptParts:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", f"messages is {_kind_of(messages)}, expected a list with at least one message")
    texts: list[str] = []
    media = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _refused(f"messages[{i}]", f"messages[{i}] is {_kind_of(message)}, expected an object")
        if not isinstance(message.get("role"), str):
            raise _refused(
                f"messages[{i}].role", f"messages[{i}].role is {_kind_of(message.get('role'))}, expected a string"
            )
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            media += _content_parts(content, f"messages[{i}].content", texts)
        elif content is not None:
            raise _refused(
                f"messages[{i}].content",
                f"messages[{i}].content is {_kind_of(content)}, expected a string or a list of parts",
            )
        if message.get("tool_calls"):
            texts.append(orjson.dumps(message["tool_calls"]).decode())
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise _refused("tools", f"tools is {_kind_of(tools)}, expected a list")
    return PromptParts(tuple(texts), 0, len(messages), media, len(orjson.dumps(tools)) if tools else 0)


def _content_parts(content: list[Any], path: str, texts: list[str]) -> int:
    media = 0
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise _refused(f"{path}[{j}]", f"{path}[{j}] is {_kind_of(part)}, expected an object")
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            texts.append(text)
        else:
            media += 1
    return media


def _completion_parts(body: dict[str, Any]) -> PromptParts:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return PromptParts((prompt,), 0, 0, 0, 0)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return PromptParts(tuple(prompt), 0, 0, 0, 0)
        if all(_is_token(item) for item in prompt):
            return PromptParts((), len(prompt), 0, 0, 0)
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in prompt):
            return PromptParts((), sum(map(len, prompt)), 0, 0, 0)
    raise _refused(
        "prompt",
        f"prompt is {_kind_of(prompt)}, expected a string, a list of strings, a list of token ids "
        "or a list of such lists, none of them empty",
    )


def _prefix(parts: PromptParts) -> int | None:
    head = ""
    for text in parts.texts:
        head += text[: PREFIX_CHARACTERS - len(head)]
        if len(head) >= PREFIX_CHARACTERS:
            digest = hashlib.blake2b(head.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            return int.from_bytes(digest)
    return None


def _typed(body: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise _refused(name, f"{name} is {_kind_of(value)}, expected {expected}")
    return value


def _integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(name, f"{name} is {_kind_of(value)}, expected a whole number from {low} to {high}")
    if not low <= value <= high:
        raise _refused(name, f"{name} is {value}, expected a whole number from {low} to {high}")
    return value


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(name, f"{name} is {_kind_of(value)}, expected a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise _refused(name, f"{name} is {value}, expected a number from {low:g} to {high:g}")
    return float(value)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _kind_of(value: Any) -> str:
    """What a value is, without a word of what it says."""
    if value is None:
        return "null or missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    return "an object"


def _refused(param: str | None, message: str) -> RequestError:
    return RequestError(Outcome.REJECTED_INVALID, message, param=param)
