"""API keys and their quotas. A key is known by its SHA-256 only; quotas are token buckets that refill by the second."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from serving.gateway.errors import RequestError
from serving.spec import Auth, Key
from serving.timeline import Outcome

KEY_PREFIX = "lw-"
ANONYMOUS = "(anonymous)"
"""Not a name that a key of the spec can have: who gives no key never shares a quota or a kept answer with one."""
MINUTE = 60.0
_ROUNDING = 1e-3
"""Of a token or request: who waits exactly as long as told is let in, whatever the sums of floats say."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may."""

    name: str
    lanes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    may_choose_lane: bool = True
    default_tier: Literal["default", "flex"] = "default"


class _Bucket:
    """Holds at most a minute's quota, and refills evenly. It may be overdrawn; the next caller waits for that too."""

    __slots__ = ("_at", "_level", "_per_minute")

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at: float | None = None

    def _refill(self, now: float) -> None:
        if self._at is not None:
            self._level = min(self._per_minute, self._level + (now - self._at) * self._per_minute / MINUTE)
        self._at = now

    def wait(self, amount: int, now: float) -> float:
        """Seconds until `amount` is there, or a whole minute's quota where `amount` is more; 0 if it is."""
        self._refill(now)
        # A request larger than the quota goes when the bucket is full and overdraws it: no pause would ever let it in.
        missing = min(amount, self._per_minute) - self._level
        return missing * MINUTE / self._per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: int) -> None:
        self._level -= amount

    def give_back(self, amount: int, now: float) -> None:
        self._refill(now)
        self._level = min(self._per_minute, self._level + amount)


class Keys:
    """The keys of a spec. The clock is passed in, seconds."""

    def __init__(self, auth: Auth) -> None:
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}
        self._known: dict[str, Key] = {}
        self.set_auth(auth)

    def set_auth(self, auth: Auth) -> None:
        """Takes over a new spec's keys; a quota that did not change keeps its level."""
        old = {key.name: key for key in self._known.values()}
        self._required = auth.required
        self._known = {key.sha256: key for key in auth.keys}
        requests, self._requests = self._requests, {}
        tokens, self._tokens = self._tokens, {}
        for key in auth.keys:
            before = old.get(key.name)
            if key.requests_per_minute is not None:
                same = before is not None and before.requests_per_minute == key.requests_per_minute
                self._requests[key.name] = requests[key.name] if same else _Bucket(key.requests_per_minute)
            if key.tokens_per_minute is not None:
                same = before is not None and before.tokens_per_minute == key.tokens_per_minute
                self._tokens[key.name] = tokens[key.name] if same else _Bucket(key.tokens_per_minute)

    def identify(self, authorization: bytes | None) -> Caller:
        """Who a request's `Authorization` header says it is from.

        Raises:
            RequestError: `rejected_auth`, 401: no key where one is required, or one that is not known.
        """
        if authorization is None or (not self._known and not self._required):
            if self._required:
                raise _unauthorized("no API key was given, expected `Authorization: Bearer KEY`")
            return Caller(ANONYMOUS)
        scheme, _, secret = authorization.partition(b" ")
        # Looked up by digest: comparing digests tells an attacker nothing about a key.
        key = self._known.get(hashlib.sha256(secret.strip()).hexdigest())
        if scheme.lower() != b"bearer" or key is None:
            raise _unauthorized("the API key is not known, expected one that was issued for this gateway")
        return Caller(key.name, key.lanes, key.models, key.may_choose_lane, key.default_tier)

    def take(self, caller: Caller, tokens: int, now: float) -> int:
        """Takes a request and an estimate of its tokens from the caller's quota; returns the tokens taken.

        Raises:
            RequestError: `rejected_quota`, with the seconds after which there is enough.
        """
        requests, bucket = self._requests.get(caller.name), self._tokens.get(caller.name)
        wait = requests.wait(1, now) if requests is not None else 0.0
        what = "requests"
        if bucket is not None and bucket.wait(tokens, now) > wait:
            wait, what = bucket.wait(tokens, now), "tokens"
        if wait > 0:
            raise RequestError(
                Outcome.REJECTED_QUOTA,
                f"the API key's quota of {what} a minute is used up, expected a pause of {wait:.1f} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        if requests is not None:
            requests.take(1)
        if bucket is not None:
            bucket.take(tokens)
        return tokens

    def settle(self, caller: Caller, taken: int, used: int, now: float) -> None:
        """The request ended and used `used` tokens of the `taken` ones."""
        bucket = self._tokens.get(caller.name)
        if bucket is not None:
            bucket.give_back(taken - used, now)


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and its digest for the spec."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def _unauthorized(message: str) -> RequestError:
    return RequestError(Outcome.REJECTED_AUTH, message, code="invalid_api_key")
