"""What counts as the first token, whatever way the bytes come in."""

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.workload.events import Answer, NotAnAnswerError


def event(delta: dict[str, object], finish: str | None = None) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
STREAM = (
    b": waiting\n\n"
    + event({"role": "assistant", "content": ""})
    + event({"content": "a"})
    + event({"content": "\n\n"})
    + event({"content": ""}, "stop")
    + USAGE
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize(
    ("delta", "content"),
    [
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"content": None}, 0),
        ({}, 0),
        ({"content": " "}, 1),
        ({"reasoning_content": "hm"}, 1),
        ({"reasoning": "hm"}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
        ({"tool_calls": []}, 0),
        ({"refusal": "no"}, 1),
    ],
)
def test_only_what_a_reader_sees_is_content(delta: dict[str, object], content: int) -> None:
    """A role chunk taken for a token makes every TTFT look like the gateway's first flush."""
    assert Answer().feed(event(delta)) == content


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int], carriage_returns: bool) -> None:
    """The network cuts where it likes; a token lost at a cut is a wrong TPOT."""
    stream = STREAM.replace(b"\n\n", b"\r\n\r\n") if carriage_returns else STREAM
    answer = Answer()
    edges = sorted({0, len(stream), *cuts})
    seen = sum(answer.feed(stream[a:b]) for a, b in itertools.pairwise(edges))
    assert seen == answer.content_chunks == 2
    assert (answer.done, answer.finished, answer.error) == (True, True, None)
    assert (answer.prompt_tokens, answer.output_tokens) == (9, 3)


def test_a_completions_stream_has_its_text_outside_a_delta() -> None:
    """`/v1/completions` is served too."""
    assert Answer().feed(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n') == 1
    assert Answer().feed(b'data: {"choices":[{"index":0,"text":""}]}\n\n') == 0


def test_an_error_event_is_kept() -> None:
    """A stream that ends with an error after status 200 is a failure, not a short answer."""
    answer = Answer()
    answer.feed(b'data: {"error":{"message":"gone","code":"engine_error"}}\n\ndata: [DONE]\n\n')
    assert answer.error == {"message": "gone", "code": "engine_error"}


def test_garbage_is_told_without_quoting_it() -> None:
    """What a server sends can hold a prompt."""
    with pytest.raises(NotAnAnswerError) as caught:
        Answer().feed(b"data: my secret prompt\n\n")
    assert "secret" not in str(caught.value)
