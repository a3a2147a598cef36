"""Hot prompts: whole answers of deterministic requests, bounded in bytes and time.

Keyed by a hash under a secret of this process over the caller, the model and the body, so that one key's users never
see another's answers and the keys tell nothing. Off by default; while it is off, only hashes are remembered, so that
the hits it would have had can be counted.
"""

import hashlib
import secrets
from collections.abc import Callable

import orjson
from cachetools import TTLCache

from serving.gateway.request import ParsedRequest
from serving.spec import Cache
from serving.telemetry.catalog import CacheResult

_NOT_IN_THE_ANSWER = frozenset({"user", "metadata", "service_tier", "priority"})
"""Fields that change nothing of what the model says; `stream` and its options do change the bytes it is said in."""
ENTRY_BYTES = 512
"""Counted for each entry on top of its answer: its key and the bookkeeping of two ordered dictionaries."""


class ResponseCache:
    """The answers (or, while off, the hashes) of one gateway."""

    def __init__(self, settings: Cache, clock: Callable[[], float], count: Callable[[str, CacheResult], None]) -> None:
        """`clock`: seconds. `count(model, result)` is told of every request that the cache may answer."""
        self._clock = clock
        self._count = count
        self._secret = secrets.token_bytes(32)
        self._make(settings)

    def set_settings(self, settings: Cache) -> None:
        """A new spec; what was kept is dropped if the settings differ."""
        if settings != self._settings:
            self._make(settings)

    @property
    def size(self) -> int:
        """Bytes of the kept answers, `ENTRY_BYTES` for each included."""
        return int(self._answers.currsize)

    def lookup(self, parsed: ParsedRequest, caller: str) -> bytes | None:
        """The kept answer to the same request of the same caller. Counts hit or miss."""
        if not self.wants(parsed):
            return None
        answer: bytes | None = self._answers.get(self._key(parsed, caller))
        self._count(parsed.model, CacheResult.MISS if answer is None else CacheResult.HIT)
        return answer

    def wants(self, parsed: ParsedRequest) -> bool:
        """Whether the answer, once it is whole, should be handed to `store`."""
        return self._settings.enabled and parsed.deterministic

    def store(self, parsed: ParsedRequest, caller: str, answer: bytes) -> None:
        """Keeps a whole, successful answer: its body, or the bytes of its stream."""
        if self.wants(parsed) and _size(answer) <= self._answers.maxsize:
            self._answers[self._key(parsed, caller)] = answer

    def completed(self, parsed: ParsedRequest, caller: str) -> None:
        """A request was answered. While the cache is off, one that was answered before would have been a hit.

        Counted here, not in `lookup`: nothing stands between a request and its first token for a cache that is off.
        """
        if parsed.deterministic and not self._settings.enabled:
            key = self._key(parsed, caller)
            if self._seen.get(key):  # not `in`, which would not tell the cache that it is in use
                self._count(parsed.model, CacheResult.WOULD_HIT)
            self._seen[key] = True

    def _make(self, settings: Cache) -> None:
        self._settings = settings
        self._answers: TTLCache[bytes, bytes] = TTLCache(
            settings.max_bytes, settings.ttl, timer=self._clock, getsizeof=_size
        )
        self._seen: TTLCache[bytes, bool] = TTLCache(settings.max_keys, settings.ttl, timer=self._clock)

    def _key(self, parsed: ParsedRequest, caller: str) -> bytes:
        asked = {key: value for key, value in parsed.body.items() if key not in _NOT_IN_THE_ANSWER}
        whose = b"%b\0%b\0" % (caller.encode(), parsed.kind.path.encode())
        text = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(whose + text, key=self._secret, digest_size=32).digest()


def _size(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES
