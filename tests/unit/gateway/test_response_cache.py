"""Kept answers of deterministic requests."""

from collections import Counter
from typing import Any

import pytest

from serving.gateway.cache import ENTRY_BYTES, ResponseCache
from serving.spec import Cache
from serving.telemetry.catalog import CacheResult
from tests.unit.gateway.bodies import chat_body, completion_body, parsed

ANSWER = b'{"choices":[{"message":{"content":"hello"}}]}'


class Setting:
    """A cache with a clock that the test moves and counts that it reads."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.counts: Counter[CacheResult] = Counter()
        self.cache = ResponseCache(
            Cache(**{"enabled": True, **settings}),
            clock=lambda: self.now,
            count=lambda model, result: self.counts.update([result]),
        )

    def ask(self, body: dict[str, Any], caller: str = "team-a", answer: bytes = ANSWER) -> bytes | None:
        """What a gateway does: looks it up and, if it is not there, stores the engine's answer."""
        request = parsed(body)
        found = self.cache.lookup(request, caller)
        if found is None:
            self.cache.store(request, caller, answer)
            self.cache.completed(request, caller)
        return found


def test_the_same_request_is_answered_from_the_cache() -> None:
    """The same prompt at temperature 0 would be computed again and again."""
    setting = Setting()
    body = chat_body(temperature=0)
    assert setting.ask(body) is None
    assert setting.ask(dict(reversed(body.items()))) == ANSWER, "the order of fields says nothing"
    assert setting.ask({**body, "user": "someone", "service_tier": "flex"}) == ANSWER
    assert setting.counts == {CacheResult.MISS: 1, CacheResult.HIT: 2}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"messages": [{"role": "user", "content": "Say goodbye."}]},
        {"max_tokens": 5},
        {"seed": 1},
        {"stream": True},
        {"cache_salt": "x"},
        {"vllm_xargs": {"watermark": 3}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_a_request_that_differs_in_anything_that_may_matter_is_not(change: dict[str, Any]) -> None:
    """An answer to another question is the worst that a cache can do."""
    setting = Setting()
    body = chat_body(temperature=0)
    setting.ask(body)
    assert setting.ask({**body, **change}) is None


def test_streams_with_different_options_are_kept_apart() -> None:
    """A client that did not ask for usage events would get another client's."""
    setting = Setting()
    body = chat_body(temperature=0, stream=True)
    setting.ask(body, answer=b"data: plain\n\n")
    usage = {**body, "stream_options": {"include_usage": True}}
    assert setting.ask(usage, answer=b"data: with usage\n\n") is None
    assert setting.ask({**body, "stream_options": {"continuous_usage_stats": True}}) is None
    assert setting.ask(usage) == b"data: with usage\n\n"
    assert setting.ask(body) == b"data: plain\n\n"


def test_one_keys_users_never_see_what_was_answered_to_another() -> None:
    """Else one customer reads another's answers, or learns by timing what the other asked."""
    setting = Setting()
    body = chat_body(temperature=0)
    setting.ask(body, caller="team-a")
    assert setting.ask(body, caller="team-b") is None
    assert setting.ask(completion_body(temperature=0), caller="team-a") is None


def test_no_part_of_the_key_can_be_moved_into_another() -> None:
    """With parts that run into each other, a caller's name could be chosen to meet another's answers."""
    setting = Setting()
    body = chat_body(temperature=0)
    setting.ask(body, caller="a")
    for caller in ("a\0", "a\0/v1/chat/completions", "", "A"):
        assert setting.ask(body, caller=caller) is None


def test_two_processes_keep_the_same_request_under_different_hashes() -> None:
    """With a secret in every process, a dump of hashes cannot be searched for a prompt."""
    first, second = Setting(), Setting()
    request = parsed(chat_body(temperature=0))
    assert first.cache._key(request, "a") != second.cache._key(request, "a")


def test_an_answer_that_may_vary_is_neither_kept_nor_counted() -> None:
    """A user who asks for variety must not get the same answer for ten minutes."""
    setting = Setting()
    assert setting.ask(chat_body()) is None
    assert setting.ask(chat_body()) is None
    assert not setting.cache.wants(parsed(chat_body()))
    assert not setting.counts


def test_an_answer_is_dropped_when_its_time_is_over() -> None:
    """A model is replaced behind its name; an answer of the old one must not outlive it for long."""
    setting = Setting(ttl=600.0)
    body = chat_body(temperature=0)
    setting.ask(body)
    setting.now = 599.0
    assert setting.ask(body) == ANSWER
    setting.now = 600.0
    assert setting.ask(body) is None


def test_the_cache_never_grows_beyond_its_bytes_and_drops_what_was_not_used() -> None:
    """A gateway that runs out of memory takes every request down with it."""
    room = 4 * (1000 + ENTRY_BYTES)
    setting = Setting(max_bytes=room)
    bodies = [chat_body(temperature=0, seed=i) for i in range(5)]
    for body in bodies[:4]:
        setting.ask(body, answer=bytes(1000))
    assert setting.ask(bodies[0]) == bytes(1000)
    setting.ask(bodies[4], answer=bytes(1000))
    assert setting.cache.size <= room
    assert setting.cache.lookup(parsed(bodies[0]), "team-a") == bytes(1000), "it was used last"
    assert setting.cache.lookup(parsed(bodies[1]), "team-a") is None
    setting.ask(chat_body(temperature=0, seed=99), answer=bytes(room))
    assert setting.cache.size <= room
    for i in range(100):
        setting.ask(chat_body(temperature=0, seed=1000 + i), answer=b"")
    assert setting.cache.size <= room, "empty answers take room as well"


def test_while_off_it_answers_nothing_and_counts_the_hits_it_would_have_had() -> None:
    """Whether to switch it on is decided by this count."""
    setting = Setting(enabled=False, max_keys=2)
    body = chat_body(temperature=0)
    assert setting.cache.lookup(parsed(body), "team-a") is None
    assert setting.cache.lookup(parsed(body), "team-a") is None
    assert not setting.counts, "nothing was answered yet that could have been kept"
    setting.cache.completed(parsed(body), "team-a")
    assert setting.ask(body) is None
    assert setting.ask(body) is None
    assert setting.counts == {CacheResult.WOULD_HIT: 2}
    assert setting.cache.size == 0
    for i in range(10):
        setting.ask(chat_body(temperature=0, seed=i))
    setting.ask(body)
    assert setting.counts == {CacheResult.WOULD_HIT: 2}, "no more hashes are remembered than the spec allows"


def test_a_changed_spec_empties_it_and_an_unchanged_one_does_not() -> None:
    """An edit of a lane must not cost every kept answer; switching it off must drop them."""
    setting = Setting()
    body = chat_body(temperature=0)
    setting.ask(body)
    setting.cache.set_settings(Cache(enabled=True))
    assert setting.ask(body) == ANSWER
    setting.cache.set_settings(Cache(enabled=False))
    assert setting.cache.size == 0
    assert setting.ask(body) is None
