"""The engine's event stream: what counts as a token, what is passed on, and that it does not matter how it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.sse import StreamScan
from tests.unit.gateway.streams import (
    CHAT,
    COMPLETION,
    DONE,
    REASONING,
    ROLE,
    TOOLS,
    TWO,
    USAGE,
    WHOLE_STREAMS,
    WORDS,
    counts_of,
    cut,
    delta,
    event_of,
    fed,
)


@pytest.mark.parametrize("name", WHOLE_STREAMS)
@pytest.mark.parametrize("pass_usage", [True, False])
def test_a_stream_is_the_same_wherever_it_is_cut(name: str, pass_usage: bool) -> None:
    """TCP cuts where it likes: a token split in two would be lost, doubled, or counted at another time."""
    stream = WHOLE_STREAMS[name]
    whole, passed, _ = fed([stream], pass_usage=pass_usage)
    for place in range(len(stream) + 1):
        scan, out, _ = fed(cut(stream, [place]), pass_usage=pass_usage)
        assert out == passed, f"cut at byte {place}"
        assert counts_of(scan) == counts_of(whole), f"cut at byte {place}"
    scan, out, _ = fed([stream[i : i + 1] for i in range(len(stream))], pass_usage=pass_usage)
    assert (out, counts_of(scan)) == (passed, counts_of(whole))
    assert whole.done
    assert whole.finished
    assert whole.rest == b""
    assert whole.error is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([TWO, COMPLETION, REASONING, TOOLS, WORDS]), st.data())
def test_a_stream_with_crlf_is_the_same_stream(stream: bytes, data: st.DataObject) -> None:
    """Some servers end lines so: an engine behind such a proxy would look broken."""
    crlf = stream.replace(b"\n", b"\r\n")
    places = data.draw(st.lists(st.integers(0, len(crlf)), max_size=6))
    plain, passed, _ = fed([stream])
    scan, out, _ = fed(cut(crlf, places))
    assert (out, counts_of(scan)) == (passed, counts_of(plain))


@pytest.mark.parametrize(
    ("stream", "counts"), [(CHAT, (12, 8)), (TWO, (12, 8)), (COMPLETION, (3, 6)), (TOOLS, (12, 3))]
)
def test_the_engine_s_usage_is_read_and_shown_only_to_who_asked(stream: bytes, counts: tuple[int, int]) -> None:
    """Quotas are settled by it; a client that did not ask for an event without choices may break on it."""
    for pass_usage in (True, False):
        scan, out, _ = fed([stream], pass_usage=pass_usage)
        assert (scan.prompt_tokens, scan.output_tokens) == counts
        assert (b'"usage"' in out.replace(b'\\"usage', b"")) is pass_usage
        assert out.endswith(DONE)
    assert fed([stream], pass_usage=True)[1] == stream, "nothing else is touched"


@pytest.mark.parametrize(
    ("event", "content"),
    [
        (ROLE, False),
        (delta(), False),
        (delta(content=None), False),
        (delta("stop", content=""), False),
        (delta("stop"), False),
        (delta(content=None, tool_calls=[]), False),
        (USAGE, False),
        (DONE, False),
        (b": keep-alive\n\n", False),
        (delta(content="x"), True),
        (delta(content=" "), True),
        (delta("length", content="x"), True),
        (delta(reasoning_content="x"), True),
        (delta(reasoning="x"), True),
        (delta(content="", reasoning="x"), True),
        (delta(tool_calls=[{"index": 0}]), True),
        (delta(function_call={"name": "f"}), True),
        (delta(refusal="No."), True),
        (event_of(choices=[{"index": 0, "text": "x", "finish_reason": None}]), True),
        (event_of(choices=[{"index": 0, "text": "", "finish_reason": None}]), False),
        (event_of(choices=[{"delta": {}}, {"delta": {"content": "x"}}]), True),
    ],
)
@pytest.mark.parametrize("after_content", [False, True])
def test_a_token_is_a_chunk_with_content_and_nothing_else(event: bytes, content: bool, after_content: bool) -> None:
    """The role's chunk comes before the prompt is computed: with it the TTFT of every request would look perfect.
    The rule holds after the first token too, where chunks are hardly looked at, or gaps between tokens would hide."""
    scan = StreamScan(pass_usage=True)
    if after_content:
        scan.feed(delta(content="first"))
    assert scan.feed(event)[1] is content


def test_tokens_that_have_no_text_yet_are_no_content() -> None:
    """vLLM sends an empty chunk for a token that is half a character: the recorded stream has eight of them."""
    _, _, contents = fed(event + b"\n\n" for event in CHAT.split(b"\n\n") if event)
    assert contents == [False] * 11
    _, _, contents = fed(event + b"\n\n" for event in TWO.split(b"\n\n") if event)
    assert contents == [False, False, True, False, False, True, True, True, False, True, False, False]


def test_the_first_token_is_told_with_the_piece_that_brought_it() -> None:
    """Told a piece later, TTFT would be late by a token; a piece earlier, it would be the role's."""
    _, out, contents = fed([ROLE, COMPLETION[:20], COMPLETION[20:300], COMPLETION[300:]])
    assert contents == [False, False, True, True]
    assert out.startswith(ROLE)


def test_words_in_a_token_are_not_taken_for_events() -> None:
    """A user who asks about this protocol would end their own stream."""
    scan, out, _ = fed(event + b"\n\n" for event in WORDS.split(b"\n\n"))
    assert scan.error is None
    assert (scan.prompt_tokens, scan.output_tokens) == (12, 3)
    assert out.count(b"data: ") == 8


def test_an_event_of_several_lines_is_one_event() -> None:
    """The format allows it, and a named event carries its data on the second line."""
    scan, out, contents = fed([b'event: chunk\ndata: {"choices":\ndata: [{"delta":{"content":"x"}}]}\n\n'])
    assert contents == [True]
    assert out.startswith(b"event: chunk\n")
    assert not scan.finished


def test_a_stream_is_finished_when_each_of_its_choices_is() -> None:
    """A replica that dies after the first of two answers would be `completed`, and the client short of one."""
    scan = StreamScan(pass_usage=False)
    for index in (0, 1):
        scan.feed(delta(index=index, role="assistant"))
    scan.feed(delta("stop", content="a"))
    assert not scan.finished
    scan.feed(delta("stop", index=1, content="b"))
    assert scan.finished
    assert not scan.done


def test_what_is_cut_off_is_left_over() -> None:
    """Bytes after the last whole event are how the gateway knows that the engine died in the middle of a word."""
    scan, out, _ = fed([COMPLETION[:500]])
    assert out + scan.rest == COMPLETION[:500]
    assert scan.rest
    assert not scan.done


def test_usage_in_every_chunk_counts_up() -> None:
    """`continuous_usage_stats`: the last figure is the one that counts, and its events carry tokens too."""
    chunks = [
        event_of(choices=[{"delta": {"content": "x"}}], usage={"prompt_tokens": 5, "completion_tokens": n})
        for n in (1, 2, 3)
    ]
    scan, out, contents = fed(chunks)
    assert (scan.prompt_tokens, scan.output_tokens) == (5, 3)
    assert contents == [True] * 3
    assert out == b"".join(chunks)
