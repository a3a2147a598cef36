"""A request's head: few headers are read, fewer go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.head import Head
from serving.gateway.uvicorn_protocol import RECEIVED

CANARY = b"lw-canary-0f9a7"


def _read(*headers: tuple[bytes, bytes], received: float | None = None) -> Head:
    scope = {"headers": list(headers), **({} if received is None else {RECEIVED: received})}
    return Head.read(scope, lambda: 7.0)


def test_receipt_is_when_the_head_was_read_not_when_the_handler_starts() -> None:
    """A busy event loop would hide its own delay from every latency figure."""
    assert _read(received=3.0).received == 3.0
    assert _read().received == 7.0


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [(b"1", 0.001), (b"250", 0.25), (b"86400000", 86_400.0), (b"00000000000000000250", 0.25)],
)
def test_a_deadline_is_read_in_milliseconds(raw: bytes, seconds: float) -> None:
    """Read as seconds, a deadline of 250 ms would let a dead request hold its place for minutes."""
    head = _read((b"x-laneway-deadline-ms", raw))
    assert (head.deadline, head.problem) == (seconds, None)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"0", "'0'"),
        (b"-5", "'-5'"),
        (b"1.5", "'1.5'"),
        (b"250ms", "'250ms'"),
        (b"86400001", "'86400001'"),
        (b"9" * 5000, "a string of 5000 characters"),
        (b"0" * 5000, "a string of 5000 characters"),
        (b"", "a string of 0 characters"),
        (b"soon", "a string of 4 characters"),
        (b"1_000", "a string of 5 characters"),
        ("²".encode("latin-1"), "a string of 1 characters"),
        (CANARY, "a string of 15 characters"),
    ],
)
def test_a_deadline_that_is_none_is_a_problem_told_later(raw: bytes, shown: str) -> None:
    """A client that mistypes it would believe that its deadline holds."""
    head = _read((b"x-laneway-deadline-ms", raw))
    assert head.deadline is None
    assert head.problem is not None
    assert (head.problem.status, head.problem.param) == (400, "x-laneway-deadline-ms")
    assert f"header x-laneway-deadline-ms is {shown}, expected milliseconds" in head.problem.message


@pytest.mark.parametrize(
    ("raw", "length"),
    [(b"0", 0), (b"42", 42), (b"00042", 42), (b"-1", None), (b"x", None), (b"", None), (b"1 2", None)],
)
def test_the_body_s_length_is_read(raw: bytes, length: int | None) -> None:
    """A body that is too large is refused by it before a byte is read."""
    assert _read((b"content-length", raw)).content_length == length


def test_an_absurd_length_is_still_too_large() -> None:
    """A number too long to convert must not become a crash, or a small one."""
    for raw in (b"9" * 5000, b"1" + b"0" * 4400):
        length = _read((b"content-length", raw)).content_length
        assert length is not None
        assert length > 1 << 40


def test_a_clients_id_is_kept_but_not_trusted_to_be_unique() -> None:
    """Two requests of one id would collide inside the engine, and one of them would fail."""
    head = _read((b"x-request-id", b"order-17"))
    assert (head.request_id, head.own_id) == ("order-17", False)
    sent = [head.upstream_headers((), None)["X-Request-Id"] for _ in range(2)]
    assert all(name.startswith("order-17-") for name in sent)
    assert sent[0] != sent[1]


@pytest.mark.parametrize("given_id", [b"", b"a b", b"x" * 129, b"a\nb", b"\xff", b'"id"', b"a/b"])
def test_an_id_that_could_break_a_log_or_a_header_is_replaced(given_id: bytes) -> None:
    """Ids stand in log lines, spans and headers."""
    head = _read((b"x-request-id", given_id))
    assert head.own_id
    assert len(head.request_id) == 32
    assert head.upstream_headers((), None)["X-Request-Id"] == head.request_id


def test_nothing_of_the_client_s_reaches_the_engine_but_its_trace() -> None:
    """A client's key would stand in the engine's log, and `x-vllm-priority` would jump every queue."""
    head = _read(
        (b"authorization", b"Bearer " + CANARY),
        (b"cookie", CANARY),
        (b"x-vllm-priority", b"-100"),
        (b"x-laneway-lane", b"batch"),
        (b"host", b"evil.example.com"),
        (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"),
        (b"tracestate", b"vendor=1"),
    )
    assert [name for name, _ in head.trace_headers] == [b"traceparent", b"tracestate"]
    sent = head.upstream_headers(head.trace_headers, "engine.internal:8000")
    assert set(sent) == {"Content-Type", "X-Request-Id", "traceparent", "tracestate", "Host"}
    assert sent["Host"] == "engine.internal:8000"
    assert CANARY.decode() not in repr(sent)


def test_wishes_are_cut_to_a_length_that_can_be_handled() -> None:
    """A lane's name of 30 kB would be compared, hashed and logged at that length."""
    head = _read((b"x-laneway-lane", b"x" * 1000), (b"x-session-id", b"y" * 1000))
    assert head.lane == "x" * 256
    assert head.session == "y" * 256
    assert (_read().lane, _read().session, _read().authorization) == (None, None, None)


names = st.sampled_from(
    [
        *(b"x-request-id", b"x-laneway-deadline-ms", b"content-length", b"x-laneway-lane", b"x-session-id"),
        *(b"authorization", b"traceparent", b"tracestate", b"x-other"),
    ]
)


@given(st.lists(st.tuples(names, st.binary(max_size=64)), max_size=6))
def test_any_head_is_read_and_its_problem_quotes_no_word_of_it(headers: list[tuple[bytes, bytes]]) -> None:
    """An exception here would leave a request without an outcome: it is read before anything can be told."""
    head = _read(*headers)
    assert head.deadline is None or 0 < head.deadline <= 86_400
    assert 1 <= len(head.request_id) <= 128
    assert head.request_id.isascii()
    head.upstream_headers(head.trace_headers, None)
