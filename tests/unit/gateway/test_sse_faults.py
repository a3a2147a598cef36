"""Engines that fail, babble or answer strangely: each is found out, none is quoted."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway import sse
from serving.gateway.sse import NotAnEventStreamError, StreamScan, WholeReply, read_whole
from tests.unit.gateway.streams import (
    DONE,
    ROLE,
    STREAMS,
    cut,
    delta,
    event_of,
    fed,
)

CANARY = "canary-0f9a7"


@pytest.mark.parametrize("error", [{"message": CANARY, "code": 500}, CANARY, ["x"]])
def test_an_error_event_is_held_back_and_told(error: Any) -> None:
    """Passed on, the engine's words, which may quote the prompt, would be the client's, and the outcome `completed`."""
    stream = ROLE + delta(content="x") + event_of(error=error) + DONE
    for pieces in ([stream], cut(stream, range(len(stream)))):
        scan, out, _ = fed(pieces)
        assert scan.error is not None
        assert CANARY.encode() not in out
        assert b"content" in out


def test_error_null_is_no_error() -> None:
    """Some servers write every field of a chunk."""
    scan, _, contents = fed([event_of(error=None, choices=[{"delta": {"content": "x"}}])] * 2)
    assert scan.error is None
    assert contents == [True, True]


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>\n\n",
        b"data: {\n\n",
        b"data: 17\n\n",
        b"data: []\n\n",
        b'data: {"x": 1}\n\n',
        b'data: {"choices": {}}\n\n',
        b'data: {"choices": [7]}\n\n',
        b"data: \xff\n\n",
        b"data: " + b"[" * 5000 + b"\n\n",
        b'{"choices": []}\n\n',
        b"\x00\x01\n\n",
    ],
)
def test_garbage_is_refused_without_being_quoted(garbage: bytes) -> None:
    """A replica that answers garbage must count as failed, and what it said must not end in a log."""
    scan = StreamScan(pass_usage=False)
    with pytest.raises(NotAnEventStreamError) as caught:
        scan.feed(ROLE + garbage)
    assert garbage.strip()[:20].decode("latin-1") not in str(caught.value)


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica gone mad would fill the gateway's memory, and take every other stream with it."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    scan = StreamScan(pass_usage=False)
    for _ in range(10):
        scan.feed(b"x" * 100)
    with pytest.raises(NotAnEventStreamError, match="more than 1000 bytes"):
        scan.feed(b"x")


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b"\n\n\n", b": ping\n\n", b"event: ping\n\n", b"id: 7\n\n"])
@pytest.mark.parametrize("place", ["first", "between", "last"])
def test_blank_lines_and_comments_are_no_fault(blank: bytes, place: str) -> None:
    """Proxies and other engines send them to keep a connection open."""
    parts = [ROLE, delta(content="a"), delta(content="b"), delta("stop"), DONE]
    parts.insert({"first": 0, "between": 2, "last": 5}[place], blank)
    for pieces in ([b"".join(parts)], parts):
        scan, out, contents = fed(pieces)
        assert scan.done
        assert scan.finished
        assert b'"a"' in out
        assert b'"b"' in out
        assert any(contents)


@pytest.mark.parametrize(
    "usage", [None, [], "12", {"prompt_tokens": True, "completion_tokens": -1}, {"prompt_tokens": "1"}]
)
def test_a_usage_that_is_none_changes_no_count(usage: Any) -> None:
    """A count of the wrong type would end in a histogram, or crash the settling of a quota."""
    scan, _, _ = fed([event_of(choices=[], usage=usage)])
    assert (scan.prompt_tokens, scan.output_tokens) == (None, None)
    whole = read_whole(json.dumps({"choices": [], "usage": usage}).encode())
    assert whole == WholeReply(None, None)


def test_a_whole_reply_is_read() -> None:
    """Requests that are not streamed are settled by the same figures."""
    assert read_whole((STREAMS / "vllm-0.32.0-chat-whole.json").read_bytes()) == WholeReply(12, 6)
    assert read_whole((STREAMS / "vllm-0.32.0-completion-whole.json").read_bytes()) == WholeReply(3, 6)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"choices": null}', b'{"error": {}}', b"<html>", b"\xff"])
def test_a_whole_reply_that_is_none_is_refused(body: bytes) -> None:
    """It would reach the client as an answer."""
    with pytest.raises(NotAnEventStreamError):
        read_whole(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "error", "index"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(json_values.map(lambda value: event_of(choices=[value], x=value) if value else b"\n"), max_size=4))
def test_any_json_in_a_stream_is_read_or_refused(events: list[bytes]) -> None:
    """A crash here is the gateway's own 500 for the engine's fault, and the replica is never found out."""
    try:
        fed(events)
    except NotAnEventStreamError:
        return


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\n\n", b"data: ", b"\r", DONE, ROLE]), max_size=8))
def test_any_bytes_are_read_or_refused(pieces: list[bytes]) -> None:
    """The same, for a replica that answers with noise."""
    try:
        fed(pieces)
    except NotAnEventStreamError:
        return
