"""API keys and their quotas."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.errors import RequestError
from serving.gateway.keys import Caller, Keys, new_key
from serving.spec import Auth, Key
from serving.timeline import Outcome

SECRET, DIGEST = new_key()


def _auth(
    requests: int | None = None, tokens: int | None = None, *, required: bool = False, name: str = "team-a"
) -> Auth:
    key = Key(name=name, sha256=DIGEST, lanes=("batch",), requests_per_minute=requests, tokens_per_minute=tokens)
    return Auth(required=required, keys=(key,))


def _bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def _wait(keys: Keys, caller: Caller, tokens: int, now: float) -> float:
    with pytest.raises(RequestError) as caught:
        keys.take(caller, tokens, now)
    assert caught.value.outcome is Outcome.REJECTED_QUOTA
    assert caught.value.status == 429
    assert caught.value.retry_after is not None
    return caught.value.retry_after


def test_a_new_key_is_known_by_its_digest_alone() -> None:
    """The spec, which is in version control, must hold nothing that lets anybody in."""
    key, digest = new_key()
    assert hashlib.sha256(key.encode()).hexdigest() == digest
    assert key not in digest
    assert new_key()[0] != key
    keys = Keys(_auth())
    assert keys.identify(_bearer(SECRET)).name == "team-a"
    assert keys.identify(_bearer(SECRET)).lanes == ("batch",)


@pytest.mark.parametrize(
    "header",
    [
        *map(_bearer, (SECRET + "x", SECRET[:-1], DIGEST, "")),
        *(b"Bearer", b"", SECRET.encode(), b"Basic " + SECRET.encode(), b"\xff\xfe"),
    ],
)
def test_a_wrong_key_is_refused_without_being_repeated(header: bytes) -> None:
    """A mistyped key in an error text stands in a log, one character away from the right one."""
    with pytest.raises(RequestError) as caught:
        Keys(_auth()).identify(header)
    assert (caught.value.outcome, caught.value.status) == (Outcome.REJECTED_AUTH, 401)
    assert caught.value.code == "invalid_api_key"
    assert SECRET[:-1] not in caught.value.message


def test_no_key_is_refused_only_where_one_is_required() -> None:
    """The first try on one's own machine needs no key; off it, everybody could use the engines."""
    anonymous = Keys(_auth()).identify(None)
    assert anonymous.lanes is None
    for header in (None, _bearer("anything")):
        with pytest.raises(RequestError):
            Keys(Auth(required=True)).identify(header)
    assert Keys(Auth()).identify(_bearer("EMPTY")) == anonymous


def test_who_has_no_key_is_never_taken_for_a_key_of_any_name() -> None:
    """Else the holder of a key named so would share its quota and its kept answers with everybody."""
    keys = Keys(_auth(1, name="anonymous"))
    named, nobody = keys.identify(_bearer(SECRET)), keys.identify(None)
    assert named.name != nobody.name
    keys.take(named, 0, 0.0)
    for _ in range(3):
        keys.take(nobody, 0, 0.0)


def test_requests_beyond_the_quota_are_let_in_again_as_it_refills() -> None:
    """A team that may ask 60 times a minute gets one request a second, not a minute of silence."""
    keys = Keys(_auth(requests=60))
    caller = keys.identify(_bearer(SECRET))
    for _ in range(60):
        keys.take(caller, 0, 100.0)
    wait = _wait(keys, caller, 0, 100.0)
    assert wait == pytest.approx(1.0)
    assert _wait(keys, caller, 0, 100.5) == pytest.approx(0.5)
    keys.take(caller, 0, 100.0 + wait)


def test_tokens_are_taken_by_estimate_and_settled_by_use() -> None:
    """Without settling, a client that asks for 1000 tokens and gets 10 is shut out after a hundredth of its quota."""
    keys = Keys(_auth(tokens=1000))
    caller = keys.identify(_bearer(SECRET))
    taken = keys.take(caller, 1000, 0.0)
    assert _wait(keys, caller, 100, 0.0) == pytest.approx(6.0)
    keys.settle(caller, taken, used=900, now=0.0)
    taken = keys.take(caller, 100, 0.0)
    keys.settle(caller, taken, used=400, now=0.0)
    assert _wait(keys, caller, 100, 0.0) == pytest.approx(24.0), "what was used beyond the estimate is owed"


def test_a_refused_request_takes_nothing() -> None:
    """Else a client that retries too early pushes its own admission away for ever."""
    keys = Keys(_auth(requests=1, tokens=60))
    caller = keys.identify(_bearer(SECRET))
    keys.take(caller, 60, 0.0)
    waits = [_wait(keys, caller, 60, 0.0) for _ in range(5)]
    assert waits == [pytest.approx(60.0)] * 5


def test_a_request_larger_than_the_quota_waits_for_a_full_bucket_and_then_goes() -> None:
    """Told to come back after a pause that is never long enough, a client would retry for ever."""
    keys = Keys(_auth(tokens=1000))
    caller = keys.identify(_bearer(SECRET))
    keys.take(caller, 500, 0.0)
    wait = _wait(keys, caller, 5000, 0.0)
    assert wait == pytest.approx(30.0)
    keys.take(caller, 5000, wait)
    assert _wait(keys, caller, 1, wait) == pytest.approx(4001 * 60 / 1000)


@given(
    per_minute=st.integers(1, 100_000_000),
    amounts=st.lists(st.tuples(st.integers(0, 200_000_000), st.floats(0, 30)), max_size=20),
)
def test_who_waits_as_long_as_told_is_let_in_and_no_sooner(per_minute: int, amounts: list[tuple[int, float]]) -> None:
    """`Retry-After` is a promise: a client that keeps it must not be refused again."""
    keys = Keys(_auth(tokens=per_minute))
    caller = keys.identify(_bearer(SECRET))
    now = 1_000_000.0
    for amount, pause in amounts:
        now += pause
        try:
            keys.take(caller, amount, now)
        except RequestError as refused:
            wait = refused.retry_after
            assert wait is not None
            assert wait > 0
            if wait > 0.01:
                with pytest.raises(RequestError):
                    keys.take(caller, amount, now + wait / 2)
            now += wait
            keys.take(caller, amount, now)


@given(
    requests=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.floats(0, 20)), min_size=1, max_size=40)
)
def test_no_more_tokens_are_used_than_a_full_bucket_its_refill_and_one_request(
    requests: list[tuple[int, int, float]],
) -> None:
    """A quota that can be passed by any pattern of requests is none."""
    per_minute = 1000
    keys = Keys(_auth(tokens=per_minute))
    caller = keys.identify(_bearer(SECRET))
    now, used, largest = 0.0, 0, 0
    for estimate, actual, pause in requests:
        now += pause
        try:
            taken = keys.take(caller, estimate, now)
        except RequestError:
            continue
        keys.settle(caller, taken, actual, now)
        used += actual
        largest = max(largest, actual)
    assert used <= per_minute + now * per_minute / 60 + largest + 1


def test_a_new_spec_keeps_the_level_of_a_quota_that_did_not_change() -> None:
    """Else any edit of the spec gives everybody a fresh quota."""
    keys = Keys(_auth(requests=1))
    caller = keys.identify(_bearer(SECRET))
    keys.take(caller, 0, 0.0)
    keys.set_auth(_auth(requests=1, tokens=50))
    assert _wait(keys, caller, 0, 0.0) > 0
    keys.set_auth(_auth(requests=2))
    keys.take(caller, 0, 0.0)
    keys.set_auth(Auth(required=True))
    with pytest.raises(RequestError):
        keys.identify(_bearer(SECRET))
