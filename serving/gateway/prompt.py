"""What of a request's prompt can be counted, and what makes two prompts want the same replica."""

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from serving.gateway.fields import kind_of, refused, sequence, string

PREFIX_CHARACTERS = 256
"""Prompts that share this much of their head prefer the same replica; vLLM caches whole blocks of 16 tokens."""

_PROMPT = "a string, a list of strings, a list of token ids or a list of such lists, none of them empty"


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What of a prompt can be counted."""

    texts: tuple[str, ...]
    token_ids: int = 0
    """Tokens given as ids: exact."""
    prompts: int = 1
    """Prompts of a completion request, each of which gets its own choices."""
    messages: int = 0
    media: int = 0
    """Images, audio and files: their tokens cannot be counted here."""
    tools_bytes: int = 0
    """Tools and tool calls, as JSON: a chat template writes them in its own way, so their tokens are estimated."""


def chat_parts(body: dict[str, Any]) -> PromptParts:
    """The parts of a chat request's prompt.

    Raises:
        RequestError: `rejected_invalid`, with the path of the field.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", f"messages is {kind_of(messages)}, expected a list with at least one message")
    texts: list[str] = []
    media = 0
    tools_bytes = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refused(f"messages[{i}]", f"messages[{i}] is {kind_of(message)}, expected an object")
        if not isinstance(message.get("role"), str):
            path = f"messages[{i}].role"
            raise refused(path, f"{path} is {kind_of(message.get('role'))}, expected a string")
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            media += _content_parts(content, f"messages[{i}].content", texts)
        elif content is not None:
            path = f"messages[{i}].content"
            raise refused(path, f"{path} is {kind_of(content)}, expected a string or a list of parts")
        if "tool_calls" in message:
            tools_bytes += _json_size(sequence(message, "tool_calls", f"messages[{i}]."))
    tools_bytes += _json_size(sequence(body, "tools")) + _json_size(sequence(body, "functions"))
    return PromptParts(tuple(texts), messages=len(messages), media=media, tools_bytes=tools_bytes)


def completion_parts(body: dict[str, Any]) -> PromptParts:
    """The parts of a completion request's prompt.

    Raises:
        RequestError: `rejected_invalid`, with the path of the field.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return PromptParts((prompt,))
    if not isinstance(prompt, list) or not prompt:
        raise refused("prompt", f"prompt is {kind_of(prompt)}, expected {_PROMPT}")
    # A prompt of 30,000 ids is looked through in C: in a Python loop it would hold up every other request for 2 ms.
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return PromptParts(tuple(prompt), prompts=len(prompt))
    if kinds == {int}:
        return PromptParts((), token_ids=_count_ids(prompt, "prompt"))
    if kinds == {list}:
        total = sum(_count_ids(ids, f"prompt[{i}]") for i, ids in enumerate(prompt))
        return PromptParts((), token_ids=total, prompts=len(prompt))
    odd = next((i for i, item in enumerate(prompt) if type(item) is not type(prompt[0])), 0)
    raise refused(f"prompt[{odd}]", f"prompt[{odd}] is {kind_of(prompt[odd])}, expected prompt to be {_PROMPT}")


def prefix_of(parts: PromptParts) -> int | None:
    """64 bits of hash over the head of the prompt; None where the prompt is too short to be worth a preference."""
    head = ""
    for text in parts.texts:
        head += text[: PREFIX_CHARACTERS - len(head)]
        if len(head) >= PREFIX_CHARACTERS:
            return int.from_bytes(hashlib.blake2b(head.encode(), digest_size=8).digest())
    return None


def _content_parts(content: list[Any], path: str, texts: list[str]) -> int:
    media = 0
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise refused(f"{path}[{j}]", f"{path}[{j}] is {kind_of(part)}, expected an object")
        name = "text" if part.get("refusal") is None else "refusal"
        if part.get(name) is not None or part.get("type") == name:
            text = string(part, name, f"{path}[{j}].")
            if text is None:
                raise refused(f"{path}[{j}].{name}", f"{path}[{j}].{name} is null or missing, expected a string")
            texts.append(text)
        else:
            media += 1
    return media


def _count_ids(ids: list[Any], path: str) -> int:
    if not ids or set(map(type, ids)) != {int} or min(ids) < 0:
        odd = next((i for i, item in enumerate(ids) if type(item) is not int or item < 0), None)
        if odd is None:
            raise refused(path, f"{path} is an empty list, expected token ids")
        raise refused(f"{path}[{odd}]", f"{path}[{odd}] is {_id_kind(ids[odd])}, expected a token id, 0 or more")
    return len(ids)


def _id_kind(value: Any) -> str:
    return "a negative number" if type(value) is int else kind_of(value)


def _json_size(value: list[Any] | None) -> int:
    return len(orjson.dumps(value)) if value else 0
