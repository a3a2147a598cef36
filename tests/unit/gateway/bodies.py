"""Specs and request bodies that the gateway's unit tests start from."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson

from serving.gateway.request import Kind, ParsedRequest, parse_body
from serving.spec import Spec, parse

SPEC_TEXT = """
lanes:
  - {name: interactive-short, max_prompt_tokens: 512, ttft: {seconds: 0.1}, deadline: 2}
  - {name: interactive-long, ttft: {seconds: 1}, deadline: 10}
  - {name: batch, tier: flex, ttft: {seconds: 60}, deadline: 600}
models:
  - {name: tiny, max_model_len: 8192, pools: {baseline: 1}}
  - {name: other, pools: {baseline: 1}}
pools:
  - {name: baseline, replicas: [{url: "http://127.0.0.1:8000"}]}
"""


@cache
def spec() -> Spec:
    """Three lanes, two models, one pool."""
    return parse(SPEC_TEXT)


def chat_body(content: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    """A chat body with one message."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def completion_body(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    """A completion body."""
    return {"model": "tiny", "prompt": prompt, **fields}


def parsed(body: Mapping[str, Any]) -> ParsedRequest:
    """The body as the gateway parses it: chat if it has messages."""
    kind = Kind.CHAT if "messages" in body else Kind.COMPLETION
    return parse_body(orjson.dumps(body), kind, spec())
