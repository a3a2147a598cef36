"""Asks the target, before a run, what the run must know: its model, its limits, its spec, and what words cost there."""

from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serving.workload.client import CONNECT_SECONDS
from serving.workload.events import Answer, NotAnAnswerError, error_of
from serving.workload.prompts import Cost, PromptMaker
from serving.workload.schedule import Address, body
from serving.workload.trace import TraceRequest

PROBE_TOKENS = (64, 1024)
"""Two lengths: their difference gives bytes per token, what is left the chat template. The longer evens words out."""
_TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=CONNECT_SECONDS)


class TargetError(RuntimeError):
    """The target does not answer as a server of this API does."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the target says of itself."""

    model: str
    max_model_len: int | None = None
    spec_digest: str | None = None
    settings: dict[str, str] = field(default_factory=dict)


def api_url(target: str) -> str:
    """The base of the API, `…/v1`, of a target given with or without it."""
    base = target.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


async def ask(session: aiohttp.ClientSession, target: str, key: str | None, model: str | None) -> Target:
    """Its model (the first it serves, unless one is named), limits and spec.

    Raises:
        TargetError: nobody answers, or it does not serve the model.
    """
    base = api_url(target)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with session.get(f"{base}/models", headers=headers, timeout=_TIMEOUT) as response:
            reply: Any = await response.json(content_type=None) if response.status == 200 else None
            status = response.status
        cards = reply["data"] if isinstance(reply, dict) else None
        served = {card["id"]: card for card in cards} if cards else {}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise TargetError(
            f"{target}: no answer ({type(error).__name__}), expected a server of the OpenAI API"
        ) from None
    except (ValueError, KeyError, TypeError):
        served, status = {}, 200
    if not served:
        raise TargetError(f"{base}/models: got status {status} without a model, expected a list of models")
    if model is not None and model not in served:
        raise TargetError(f"--model: got {model!r}, expected one that {target} serves: {', '.join(served)}")
    chosen = model or next(iter(served))
    limit = served[chosen].get("max_model_len")
    digest, settings = await _readiness(session, base.removesuffix("/v1"))
    return Target(chosen, limit if isinstance(limit, int) else None, digest, settings)


async def _readiness(session: aiohttp.ClientSession, base: str) -> tuple[str | None, dict[str, str]]:
    """The gateway's spec digest and settings; nothing where the target is no gateway."""
    try:
        async with session.get(f"{base}/readyz", timeout=_TIMEOUT) as response:
            reply = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None, {}
    if not isinstance(reply, dict):
        return None, {}
    digest, pools = reply.get("spec_digest"), reply.get("pools")
    return (
        digest if isinstance(digest, str) else None,
        pool_settings(pools) if isinstance(pools, dict) else {},
    )


def pool_settings(pools: dict[str, Any]) -> dict[str, str]:
    """The switches that comparisons are about, as `/readyz` names them; one value per pool where pools differ."""
    settings: dict[str, str] = {}
    for name in ("gateway_scheduler", "engine_scheduler", "engine"):
        values = {pool: str(said[name]) for pool, said in pools.items() if isinstance(said, dict) and name in said}
        distinct = sorted(set(values.values()))
        if len(distinct) == 1:
            settings[name] = distinct[0]
        elif distinct:
            settings[name] = " ".join(f"{pool}={value}" for pool, value in sorted(values.items()))
    return settings


async def word_cost(session: aiohttp.ClientSession, target: str, address: Address, prompts: PromptMaker) -> Cost:
    """What words cost at the target, from the usage of two small requests.

    Raises:
        TargetError: they fail, or the answers have no usage.
    """
    points: list[tuple[int, int]] = []
    for tokens in PROBE_TOKENS:
        text = prompts.text(tokens, f"probe {tokens}")
        points.append((len(text.encode()), await _prompt_tokens(session, target, address, text)))
    (bytes_a, tokens_a), (bytes_b, tokens_b) = points
    if tokens_b <= tokens_a:
        raise TargetError(
            f"{target}: prompts of {bytes_a} and {bytes_b} bytes are {tokens_a} and {tokens_b} tokens there"
        )
    per_token = (bytes_b - bytes_a) / (tokens_b - tokens_a)
    return Cost(bytes_per_token=per_token, template_tokens=max(0.0, tokens_a - bytes_a / per_token))


async def template_tokens(
    session: aiohttp.ClientSession, target: str, address: Address, text: str, tokens: int
) -> float:
    """Tokens that the target's chat template puts round `text`, which makes `tokens` by the model's tokenizer.

    Raises:
        TargetError: the request fails, or its answer has no usage.
    """
    return max(0.0, await _prompt_tokens(session, target, address, text) - tokens)


async def _prompt_tokens(session: aiohttp.ClientSession, target: str, address: Address, text: str) -> int:
    headers = {"content-type": "application/json"}
    if address.key:
        headers["authorization"] = f"Bearer {address.key}"
    request = TraceRequest(arrival=0.0, prompt_tokens=1, output_tokens=1, streamed=False)
    try:
        async with session.post(
            f"{api_url(target)}/chat/completions", data=body(request, address, text), headers=headers, timeout=_TIMEOUT
        ) as response:
            data = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise TargetError(f"{target}: the probe got no answer ({type(error).__name__})") from None
    if response.status != 200:
        code = error_of(data).get("code")
        raise TargetError(f"{target}: the probe got status {response.status} (code {code!r}), expected 200")
    answer = Answer()
    try:
        answer.whole(data)
    except NotAnAnswerError as error:
        raise TargetError(f"{target}: the probe got {error}, expected a chat completion") from None
    if not answer.prompt_tokens:
        raise TargetError(f"{target}: the probe's answer has no usage, expected prompt_tokens")
    return answer.prompt_tokens
