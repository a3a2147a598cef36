"""Which lane a request belongs to: by its measured length, its service tier, and what its API key may use."""

import re
from typing import Protocol

from serving.spec import Lane, Spec

FLEX = "flex"
AUTO = "auto"
"""What the OpenAI API takes a request for that names no tier."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{0,63}")


class LaneRefusedError(ValueError):
    """The request may not have a lane. `param` names the field, if any; `forbidden` tells 403 from 400."""

    def __init__(self, message: str, param: str | None, *, forbidden: bool) -> None:
        super().__init__(message)
        self.param = param
        self.forbidden = forbidden


class Permissions(Protocol):
    """What an API key may."""

    @property
    def lanes(self) -> tuple[str, ...] | None:
        """Lanes that it may use; None: every lane."""

    @property
    def may_choose_lane(self) -> bool:
        """Its wish for a lane is honoured."""

    @property
    def default_tier(self) -> str:
        """Tier of requests that name none."""


def choose_lane(
    spec: Spec, prompt_tokens: int, service_tier: str | None, permissions: Permissions, asked: str | None
) -> Lane:
    """The first lane of the request's tier that takes its length and that its key may use.

    A lane that the client asks for is given where its key may choose and the prompt fits: the length is measured, not
    believed, so a longer prompt goes where its length belongs.

    Raises:
        LaneRefusedError: the asked lane does not exist or is not the key's, or the key may use no lane that fits.
    """
    if asked is not None and permissions.may_choose_lane:
        lane = _asked(spec, permissions, asked)
        if _fits(lane, prompt_tokens):
            return lane
    tier = permissions.default_tier if service_tier in (None, AUTO) else service_tier
    wanted = FLEX if tier == FLEX and any(lane.tier == FLEX for lane in spec.lanes) else "default"
    for lane in spec.lanes:
        if lane.tier == wanted and _fits(lane, prompt_tokens) and _allowed(permissions, lane):
            return lane
    for lane in spec.lanes:  # a key that is kept to one lane is served there, whatever tier its requests name
        if _fits(lane, prompt_tokens) and _allowed(permissions, lane):
            return lane
    raise LaneRefusedError(
        f"the prompt has {prompt_tokens} tokens, expected no more than the lanes take that the API key may use: "
        f"{list(permissions.lanes or ())}",
        None,
        forbidden=True,
    )


def _asked(spec: Spec, permissions: Permissions, asked: str) -> Lane:
    names = [lane.name for lane in spec.lanes]
    if asked not in names:
        shown = repr(asked) if _NAME.fullmatch(asked) else f"a string of {len(asked)} characters"
        raise LaneRefusedError(
            f"header x-laneway-lane is {shown}, expected one of {names}", "x-laneway-lane", forbidden=False
        )
    lane = spec.lane(asked)
    if not _allowed(permissions, lane):
        raise LaneRefusedError(
            f"header x-laneway-lane is {asked!r}, expected a lane that the API key may use: "
            f"{list(permissions.lanes or ())}",
            "x-laneway-lane",
            forbidden=True,
        )
    return lane


def _fits(lane: Lane, prompt_tokens: int) -> bool:
    return lane.max_prompt_tokens is None or prompt_tokens <= lane.max_prompt_tokens


def _allowed(permissions: Permissions, lane: Lane) -> bool:
    return permissions.lanes is None or lane.name in permissions.lanes
