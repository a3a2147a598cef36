"""What a client may send, what it is told when it may not, and what of it the engine gets."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.errors import RequestError, error_body
from serving.gateway.request import MAX_DEPTH, Kind, ParsedRequest, parse_body
from serving.timeline import Outcome
from tests.unit.gateway.bodies import chat_body, completion_body, parsed, spec

SECRET = "canary secret: my card is 4111111111111111"


def _refusal(raw: bytes, kind: Kind = Kind.CHAT) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_body(raw, kind, spec())
    return caught.value


def _parse_or_refuse(raw: bytes, kind: Kind) -> tuple[ParsedRequest | None, RequestError | None]:
    try:
        return parse_body(raw, kind, spec()), None
    except RequestError as refused:
        return None, refused


def _encoded(body: Any) -> bytes:
    """JSON of anything; NaN and numbers of any size as clients write them that are not careful."""
    return json.dumps(body).encode()


def _sent(body: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(parsed(body).upstream_body("batch", 1500)))


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "model", "missing"),
        (chat_body(model=7), "model", "a number, expected a string"),
        ({"model": "tiny"}, "messages", "null or missing, expected a list"),
        ({"model": "tiny", "messages": []}, "messages", "at least one message"),
        ({"model": "tiny", "messages": "hello"}, "messages", "a string of 5 characters"),
        ({"model": "tiny", "messages": [[]]}, "messages[0]", "expected an object"),
        ({"model": "tiny", "messages": [{"content": "x"}]}, "messages[0].role", "null or missing"),
        (chat_body(content=4111111111111111), "messages[0].content", "a number, expected a string or a list of parts"),
        (chat_body(content=["x"]), "messages[0].content[0]", "expected an object"),
        (chat_body(content=[{"type": "text", "text": 5}]), "messages[0].content[0].text", "a number"),
        (chat_body(content=[{"type": "text"}]), "messages[0].content[0].text", "null or missing"),
        (chat_body(stream="yes"), "stream", "expected true or false"),
        (chat_body(stream=1), "stream", "expected true or false"),
        (chat_body(stream_options={"include_usage": True}), "stream_options", "where stream is not true"),
        (chat_body(stream=True, stream_options=[]), "stream_options", "expected an object"),
        (
            chat_body(stream=True, stream_options={"include_usage": 1}),
            "stream_options.include_usage",
            "expected true or false",
        ),
        (chat_body(max_tokens=0), "max_tokens", "max_tokens is 0, expected a whole number from 1 to 32768"),
        (chat_body(max_tokens=-5), "max_tokens", "-5"),
        (chat_body(max_tokens=10**9), "max_tokens", "1000000000"),
        (chat_body(max_tokens=True), "max_tokens", "true or false"),
        (chat_body(max_tokens="64"), "max_tokens", "a string of 2 characters"),
        (chat_body(max_tokens=1.5), "max_tokens", "1.5"),
        (chat_body(max_completion_tokens=0), "max_completion_tokens", "0"),
        (chat_body(max_completion_tokens=8, max_tokens=-1), "max_tokens", "-1"),
        (chat_body(n=0), "n", "from 1 to 128"),
        (chat_body(n=129), "n", "from 1 to 128"),
        (chat_body(temperature=-0.1), "temperature", "-0.1, expected a number from 0 to 2"),
        (chat_body(temperature="hot"), "temperature", "a string of 3 characters"),
        (chat_body(service_tier=1), "service_tier", "expected a string"),
        (chat_body(user={}), "user", "expected a string"),
        (chat_body(tools={}), "tools", "expected a list"),
        (chat_body(vllm_xargs="x"), "vllm_xargs", "expected an object"),
    ],
)
def test_a_wrong_chat_field_is_named_with_what_it_holds_and_what_was_expected(
    body: dict[str, Any], param: str, says: str
) -> None:
    """Without it a user gets a 500, or searches a body of 30 kB for the field that is wrong."""
    refused = _refusal(orjson.dumps(body))
    assert (refused.outcome, refused.status, refused.param) == (Outcome.REJECTED_INVALID, 400, param)
    assert refused.message.startswith(param)
    assert says in refused.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 2, -3], "prompt[2]"),
        ([[1], []], "prompt[1]"),
        ([[1], [2, "x"]], "prompt[1][1]"),
        ([{}], "prompt[0]"),
    ],
)
def test_a_wrong_prompt_is_named_to_the_item(prompt: Any, param: str) -> None:
    """Of 30,000 token ids, a user must be told which one is wrong."""
    assert _refusal(orjson.dumps(completion_body(prompt)), Kind.COMPLETION).param == param


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b'{"model": "tiny",}', "line 1 column 17"),
        (b'{"model": "tiny", "temperature": NaN}', "not JSON"),
        (b'{"model": "tiny", "temperature": 1e999}', "not JSON"),
        (b'{"model": "ti\xffny"}', "not JSON"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b"[]", "a list of 0 items, expected an object"),
        (b'"text"', "expected an object"),
        (b"null", "expected an object"),
        (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_its_place(raw: bytes, says: str) -> None:
    """A client library that builds bodies by hand is debugged by this message alone."""
    refused = _refusal(raw)
    assert (refused.outcome, refused.status, refused.param) == (Outcome.REJECTED_INVALID, 400, None)
    assert says in refused.message


def test_a_body_nested_deeper_than_can_be_passed_on_is_refused_and_one_less_deep_is_passed_on() -> None:
    """A nesting bomb in a field that the gateway does not know must not end in an internal error."""

    def nested(levels: int) -> bytes:
        return b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"z":%b}' % (b"[" * levels + b"]" * levels)

    assert "nested too deep" in _refusal(nested(MAX_DEPTH)).message
    assert parse_body(nested(MAX_DEPTH - 1), Kind.CHAT, spec()).upstream_body("batch", 1)


def test_an_unknown_model_is_a_404_that_lists_the_served_ones() -> None:
    """Someone who mistypes a model name is told the right one."""
    refused = _refusal(orjson.dumps(chat_body(model="gpt-9")))
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")
    assert "'gpt-9'" in refused.message
    assert "tiny, other" in refused.message


def test_of_a_field_that_stands_twice_the_engine_gets_only_the_one_that_was_checked() -> None:
    """Else a client shows the gateway a small max_tokens, and the engine, which may read the other one, a huge one."""
    raw = b'{"model":"tiny","prompt":"x","max_tokens":99999999,"max_tokens":8}'
    request = parse_body(raw, Kind.COMPLETION, spec())
    assert request.max_output_tokens == 8
    assert request.upstream_body("batch", 1).count(b"max_tokens") == 1


@pytest.mark.parametrize(
    "forged",
    [
        b'"priority":-100',
        b'"\\u0070riority":-100',
        b'"vllm_xargs":{"lane":"interactive-short","deadline_ms":1,"mine":2}',
        b'"vllm_xargs":{"l\\u0061ne":"interactive-short"},"vllm_xargs":{"mine":2}',
        b'"vllm_xargs":null',
    ],
)
def test_what_a_client_could_forge_towards_the_engine_is_replaced_by_the_gateways_own(forged: bytes) -> None:
    """Else one client overtakes all others by naming another lane or a priority, whatever its key allows."""
    raw = b'{"model":"tiny","prompt":"x",%b}' % forged
    pairs: list[str] = []

    def collect(items: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs.extend(name for name, _ in items)
        return dict(items)

    sent = json.loads(parse_body(raw, Kind.COMPLETION, spec()).upstream_body("batch", 1500), object_pairs_hook=collect)
    arguments = sent["vllm_xargs"]
    assert arguments["lane"] == "batch"
    assert arguments["deadline_ms"] == 1500
    assert arguments.get("mine", 2) == 2
    assert "priority" not in pairs
    assert [pairs.count(name) for name in ("lane", "deadline_ms", "vllm_xargs")] == [1, 1, 1]


def test_a_stream_is_always_asked_for_its_usage_and_the_clients_own_options_stay() -> None:
    """Quotas and estimates are settled by usage; and a client's other stream options are its own business."""
    assert _sent(chat_body(stream=True))["stream_options"] == {"include_usage": True}
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert _sent(chat_body(stream=True, stream_options=options))["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
    }
    assert not parsed(chat_body(stream=True, stream_options=options)).include_usage
    assert parsed(chat_body(stream=True, stream_options={"include_usage": True})).include_usage
    assert "stream_options" not in _sent(chat_body())


def test_output_tokens_count_all_choices_of_all_prompts() -> None:
    """Else a key's token quota is bypassed by asking for 128 choices at once."""
    assert parsed(chat_body(max_tokens=10, n=3)).max_output_tokens == 30
    assert parsed(completion_body(["a", "b"], max_tokens=10, n=3)).max_output_tokens == 60
    assert parsed(chat_body(max_tokens=10, max_completion_tokens=7)).max_output_tokens == 7
    assert parsed(chat_body()).max_output_tokens == spec().gateway.limits.default_output_tokens


@pytest.mark.parametrize(
    ("body", "deterministic"),
    [
        (chat_body(temperature=0), True),
        (chat_body(temperature=0.0, n=1, stream=True), True),
        (chat_body(), False),
        (chat_body(temperature=0.1), False),
        (chat_body(temperature=0, n=2), False),
        (chat_body(temperature=0, tools=[{"type": "function"}]), False),
        (chat_body(temperature=0, logprobs=True), False),
        (chat_body([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}], temperature=0), False),
        (completion_body(temperature=0, logprobs=5), False),
    ],
)
def test_only_a_request_whose_answer_cannot_vary_is_deterministic(body: dict[str, Any], deterministic: bool) -> None:
    """A kept answer to a request that may be answered differently each time would be a wrong answer."""
    assert parsed(body).deterministic is deterministic


def _json(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    )


_JSON = _json(st.integers() | st.floats())
_PROPER_JSON = _json(st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False))
_KNOWN = (
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"),
    *("temperature", "tools", "functions", "user", "service_tier", "vllm_xargs", "priority", "logprobs"),
)
_FIELDS = st.dictionaries(
    st.sampled_from([*_KNOWN, "other"]),
    _JSON
    | st.just("tiny")
    | st.lists(st.fixed_dictionaries({"role": _JSON, "content": _JSON, "tool_calls": _JSON}), max_size=2),
)


@given(body=_FIELDS | _JSON, kind=st.sampled_from(Kind))
@settings(max_examples=400, deadline=None)
def test_any_json_is_either_good_or_refused_in_the_openai_shape(body: Any, kind: Kind) -> None:
    """A body that nobody thought of must not be an internal error."""
    raw = _encoded(body)
    request, refused = _parse_or_refuse(raw, kind)
    if request is None:
        assert refused is not None
        assert refused.outcome is Outcome.REJECTED_INVALID
        assert 400 <= refused.status < 500
        assert orjson.loads(error_body(refused))["error"]["message"]


@given(
    others=st.dictionaries(st.text(max_size=12), _PROPER_JSON, max_size=6),
    base=st.sampled_from([chat_body(), chat_body(stream=True), chat_body(priority=1), completion_body([1, 2])]),
)
@settings(max_examples=300, deadline=None)
def test_fields_that_the_gateway_does_not_know_reach_the_engine_unchanged(
    others: dict[str, Any], base: dict[str, Any]
) -> None:
    """A parameter of the engine's next release must work through the gateway on the day it appears."""
    raw = _encoded({**{name: value for name, value in others.items() if name not in _KNOWN}, **base})
    kind = Kind.CHAT if "messages" in base else Kind.COMPLETION
    sent = orjson.loads(parse_body(raw, kind, spec()).upstream_body("batch", 5))
    own = ("vllm_xargs", "priority", "stream_options")
    assert sent.pop("vllm_xargs") == {"lane": "batch", "deadline_ms": 5}
    assert sent.pop("stream_options", None) == ({"include_usage": True} if base.get("stream") else None)
    assert sent == {name: value for name, value in orjson.loads(raw).items() if name not in own}


@given(raw=st.binary(max_size=200), kind=st.sampled_from(Kind))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_understood(raw: bytes, kind: Kind) -> None:
    """Garbage from a port scanner must not be an internal error."""
    request, refused = _parse_or_refuse(raw, kind)
    assert request is not None or (refused is not None and refused.outcome is Outcome.REJECTED_INVALID)


_SECRETS: list[Any] = [
    SECRET,
    [SECRET],
    {"type": SECRET},
    4111111111111111,
    "sk-4111111111111111",
    "lw-4111111111111111",
]


@pytest.mark.parametrize("secret", _SECRETS)
@pytest.mark.parametrize(
    "place",
    [*_KNOWN, "role", "content", "part", "tool_calls", "include_usage", "broken", "field_name"],
)
def test_what_was_put_into_a_wrong_field_never_comes_back_in_an_error(place: str, secret: Any) -> None:
    """Errors are logged: a prompt or key that a client put into the wrong field would stand in the access log."""
    body = completion_body() if place == "prompt" else chat_body(content=SECRET)
    kind = Kind.COMPLETION if place == "prompt" else Kind.CHAT
    match place:
        case "role" | "content" | "tool_calls":
            body["messages"][0] = {"role": "user", "content": "x", place: secret}
        case "part":
            body["messages"][0]["content"] = [secret, {"type": "text", "text": secret}]
        case "include_usage":
            body |= {"stream": True, "stream_options": {"include_usage": secret}}
        case "field_name":
            body["model"], body[str(secret)] = 5, secret
        case _:
            body[place] = secret
    raw = orjson.dumps(body)
    if place == "broken":
        raw = raw[:-1] + b',"x":' + SECRET.encode()
    request, refused = _parse_or_refuse(raw, kind)
    told = repr(request) if refused is None else str(refused) + repr(refused) + error_body(refused).decode()
    if place in ("temperature", "n", "max_tokens", "max_completion_tokens") and isinstance(secret, int):
        return  # a number that is out of its range is told by its value
    assert "canary" not in told
    assert "4111111111111111" not in told
