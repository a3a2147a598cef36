"""Where a request goes: its lane, and the pool that serves it."""

import hashlib

from serving.gateway.errors import RequestError
from serving.gateway.keys import Caller
from serving.gateway.request import Kind, ParsedRequest
from serving.gateway.tokens import PromptCount
from serving.lanes import LaneRefusedError, choose_lane
from serving.spec import Lane, Model, Spec
from serving.timeline import Outcome


def lane_for(spec: Spec, parsed: ParsedRequest, count: PromptCount, caller: Caller, asked: str | None) -> Lane:
    """The lane of a request whose prompt was counted.

    Raises:
        RequestError: the key may use neither the model nor a lane that fits, or the prompt is too long for the model.
    """
    if caller.models is not None and parsed.model not in caller.models:
        raise RequestError(
            Outcome.REJECTED_AUTH,
            f"model is {parsed.model!r}, expected one that the API key may use: {list(caller.models)}",
            param="model",
            status=403,
        )
    model = spec.model(parsed.model)
    if model is not None and count.at_least >= model.max_model_len:
        raise RequestError(
            Outcome.REJECTED_INVALID,
            f"the prompt has at least {count.at_least} tokens, expected fewer than the model's {model.max_model_len}",
            param="prompt" if parsed.kind is Kind.COMPLETION else "messages",
            code="context_length_exceeded",
        )
    try:
        return choose_lane(spec, count.tokens, parsed.service_tier, caller, asked)
    except LaneRefusedError as refused:
        forbidden = refused.forbidden
        outcome = Outcome.REJECTED_AUTH if forbidden else Outcome.REJECTED_INVALID
        raise RequestError(outcome, str(refused), param=refused.param, status=403 if forbidden else None) from None


def sticky_pool(model: Model, key: str) -> str:
    """The pool that serves this user or session, by the weights; the same one as long as these stay."""
    total = sum(model.pools.values())
    point = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % total
    for pool, weight in model.pools.items():
        point -= weight
        if point < 0:
            return pool
    raise AssertionError("weights add up to their sum")
