"""What a request asks of the simulated replica, or why it is refused: parsed and checked as vLLM 0.32 does it.

Statuses, error types and parameters are vLLM's; messages name what was wrong but, unlike vLLM's, never repeat what was
sent. What is not simulated (several choices, log-probabilities, tools, images) is refused; `stop` strings are accepted
and never match, since the text means nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Tokenizer

from serving.engine.tiny_model import chat_prompt


class RefusedError(Exception):
    """The request is refused: HTTP status, and the body's error object."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


class _StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    priority: int = 0
    seed: int | None = None


class _Chat(_Request):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None


class _Text(_Request):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    logprobs: int | None = None
    echo: bool | None = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request that can be computed, but for its prompt, which is still to be tokenized."""

    chat: bool
    text: str | None
    """The prompt's text, or None where it came as tokens."""
    tokens: list[int]
    """The prompt's tokens where it came as such."""
    asked_tokens: int | None
    """Output limit."""
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    temperature: float | None
    top_p: float | None


def parse(body: bytes, content_type: str, chat: bool, served: str, max_model_len: int) -> Parsed:
    """Reads a request's body.

    Raises:
        RefusedError: with the status that vLLM gives it.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(400, "Bad Request", "the body is not application/json")
    request = _validated(body, _Chat if chat else _Text)
    if request.model is not None and request.model != served:
        raise RefusedError(404, "NotFoundError", f"the model does not exist; there is `{served}`", "model")
    asked = request.max_tokens
    if isinstance(request, _Chat):
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else asked
    elif asked is None:
        asked = COMPLETION_TOKENS
    _check_sampling(request, asked, max_model_len)
    text, tokens = _chat_text(request) if isinstance(request, _Chat) else _prompt(request)
    options = request.stream_options
    return Parsed(
        chat=chat,
        text=text,
        tokens=tokens,
        asked_tokens=asked,
        min_tokens=max(request.min_tokens, 0),
        ignore_eos=request.ignore_eos,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        temperature=request.temperature,
        top_p=request.top_p,
    )


COMPLETION_TOKENS = 16
"""Output limit of a text completion that names none (the OpenAI API's default)."""


def check_length(prompt_tokens: int, max_model_len: int) -> None:
    """Raises RefusedError when the prompt leaves no room for a single token."""
    if prompt_tokens >= max_model_len:
        raise RefusedError(
            400,
            "BadRequestError",
            f"prompt: got at least {min(prompt_tokens, max_model_len + 1)} tokens, "
            f"expected fewer than {max_model_len}, which is this model's context length",
            "input_tokens",
        )


def encode(parsed: Parsed, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens. Chat prompts have their special tokens in the text."""
    if parsed.text is None:
        return parsed.tokens
    return list(tokenizer.encode(parsed.text, add_special_tokens=not parsed.chat).ids)


def _validated(body: bytes, kind: type[_Chat] | type[_Text]) -> _Chat | _Text:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        position = _json_position(body)
        problem = "Field required" if not body else "JSON decode error"
        param = "body" if not body else f"body.{position}"
        raise RefusedError(400, "Bad Request", f"1 validation error: {param}: {problem}", param) from None
    if not isinstance(data, dict):
        raise RefusedError(400, "Bad Request", "1 validation error: body: expected an object", "body")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        paths = [".".join(["body", *map(str, fault["loc"])]) for fault in faults]
        listed = "; ".join(f"{path}: {fault['msg']}" for path, fault in zip(paths, faults, strict=True))
        plural = "" if len(faults) == 1 else "s"
        raise RefusedError(400, "Bad Request", f"{len(faults)} validation error{plural}: {listed}", paths[0]) from None


def _json_position(body: bytes) -> int:
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return error.pos
    except (ValueError, RecursionError):
        return 0
    return 0


def _check_sampling(request: _Chat | _Text, asked: int | None, max_model_len: int) -> None:
    if request.stream_options is not None and not request.stream:
        raise _bad("stream_options", "set", "no such field without stream")
    if asked is not None and asked < 1:
        raise _bad("max_tokens", asked, "at least 1")
    if asked is not None and asked > max_model_len:
        raise _bad("max_tokens", asked, f"at most max_model_len ({max_model_len})")
    if request.temperature is not None and not request.temperature >= 0:
        raise _bad("temperature", request.temperature, "at least 0")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _bad("top_p", request.top_p, "a number above 0 and up to 1")
    if request.n is not None and request.n < 1:
        raise _bad(None, f"n {request.n}", "n of at least 1")
    if request.n is not None and request.n > 1:
        raise _bad("n", request.n, "1: the simulated replica makes one choice")
    if request.logprobs:
        raise _bad("logprobs", "set", "none: the simulated replica has no probabilities")
    if isinstance(request, _Chat):
        if request.tools and request.tool_choice != "none":
            raise _bad(None, "tools", "none: no tool parser is set up")
        if request.response_format is not None and request.response_format.get("type") != "text":
            raise _bad("response_format", "set", "text: the simulated replica keeps to no format")
    elif request.echo:
        raise _bad("echo", True, "false: the simulated replica does not repeat prompts")


def _bad(param: str | None, got: object, expected: str) -> RefusedError:
    name = f"{param}: " if param else ""
    return RefusedError(400, "BadRequestError", f"{name}got {got}, expected {expected}", param)


def _chat_text(request: _Chat) -> tuple[str, list[int]]:
    if not request.messages:
        raise RefusedError(400, "BadRequestError", "messages: got none, expected at least one")
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(request.messages):
        role = message.get("role")
        if not isinstance(role, str):
            path = f"body.messages.{index}.role"
            raise RefusedError(400, "Bad Request", f"1 validation error: {path}: expected a string", path)
        turns.append((role, _content(message.get("content"), index)))
    return chat_prompt(turns), []


def _content(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    path = f"body.messages.{index}.content"
    if not isinstance(content, list):
        raise RefusedError(400, "Bad Request", f"1 validation error: {path}: expected a string or parts", path)
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RefusedError(400, "BadRequestError", "the model takes text only")
    return "\n".join(texts)


def _prompt(request: _Text) -> tuple[str | None, list[int]]:
    prompt = request.prompt
    if prompt is None or prompt == "":
        raise _bad("prompt", "none", "a text or tokens")
    if isinstance(prompt, str):
        return prompt, []
    if not prompt:
        raise _bad(None, "no prompt", "at least one")
    first = prompt[0]
    if isinstance(first, int):
        return None, [token for token in prompt if isinstance(token, int)]
    if len(prompt) > 1:
        raise _bad("prompt", f"{len(prompt)} prompts", "one: the simulated replica computes one a request")
    if isinstance(first, str):
        return first, []
    return None, first
