"""How many tokens a prompt is believed to have, with a tokenizer and without."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from serving.gateway import tokens as tokens_module
from serving.gateway.prompt_fit import MOST_PER_MESSAGE, PromptFit
from serving.gateway.tokens import MEDIA_TOKENS, MOST_BYTES_PER_TOKEN, TokenCounter
from serving.spec import Model
from tests.unit.gateway.bodies import chat_body, completion_body, parsed

TEXT = "Users wait in the queue, not on the GPU; nothing else means anything until that wait is explained. "
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real byte-level BPE that puts a token before every prompt and, as some files do, truncates and pads."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def _model(tokenizer: Path | None = None, max_model_len: int = 8192) -> Model:
    name = None if tokenizer is None else str(tokenizer)
    return Model(name="tiny", tokenizer=name, max_model_len=max_model_len, pools={"baseline": 1})


def _true_count(file: Path, text: str, *, special: bool) -> int:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return len(tokenizer.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("repeat", [1, 5, 400])
@pytest.mark.parametrize("folder", [True, False])
async def test_with_the_models_tokenizer_a_completions_count_is_the_engines(
    tokenizer_file: Path, repeat: int, folder: bool
) -> None:
    """A count that a tokenizer file's training settings cut short would put every long prompt into the short lane."""
    counter = TokenCounter(_model(tokenizer_file.parent if folder else tokenizer_file))
    text = TEXT * repeat
    count = await counter.count(parsed(completion_body(text)))
    assert count.exact
    assert count.tokens == count.at_least == _true_count(tokenizer_file, text, special=True)
    bare = await counter.count(parsed(completion_body(text, add_special_tokens=False)))
    assert bare.tokens == count.tokens - 1
    several = await counter.count(parsed(completion_body([text, "x"])))
    assert several.tokens == count.tokens + _true_count(tokenizer_file, "x", special=True)


@pytest.mark.parametrize(("prompt", "expected"), [([1, 2, 3], 3), ([[1, 2], [3, 4, 5]], 5)])
async def test_token_ids_are_counted_as_they_are(prompt: list[object], expected: int) -> None:
    """They are what the engine computes: there is nothing to estimate."""
    count = await TokenCounter(_model()).count(parsed(completion_body(prompt)))
    assert (count.tokens, count.exact, count.at_least) == (expected, True, expected)


async def test_a_long_text_is_counted_off_the_event_loop(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 30 kB takes 8 ms to tokenize, which every other request would wait for."""
    threads: list[str] = []
    true_tokenize = tokens_module._tokenize

    def spy(*arguments: object) -> int:
        try:
            asyncio.get_running_loop()
            threads.append("loop")
        except RuntimeError:
            threads.append("thread")
        return true_tokenize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens_module, "_tokenize", spy)
    counter = TokenCounter(_model(tokenizer_file))
    await counter.count(parsed(completion_body("short")))
    await counter.count(parsed(completion_body(TEXT * 300)))
    assert threads == ["loop", "thread"]


async def test_a_text_far_beyond_the_models_length_is_not_tokenized_and_is_known_to_be_too_long(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 4 MB would keep a core busy for a second, only to be refused."""
    monkeypatch.setattr(tokens_module, "_tokenize", lambda *_: pytest.fail("it was tokenized"))
    counter = TokenCounter(_model(tokenizer_file, max_model_len=100))
    count = await counter.count(parsed(completion_body("x" * int(101 * MOST_BYTES_PER_TOKEN))))
    assert not count.exact
    assert count.at_least > 100


async def test_what_cannot_be_counted_is_estimated_and_said_to_be() -> None:
    """An estimate that passes for a count would refuse prompts that fit."""
    counter = TokenCounter(_model())
    text = await counter.count(parsed(chat_body(TEXT)))
    part = {"type": "text", "text": TEXT}
    image = await counter.count(parsed(chat_body([part, IMAGE])))
    tools = await counter.count(parsed(chat_body(TEXT, tools=[{"type": "function", "function": {"name": "f" * 400}}])))
    assert [count.exact for count in (text, image, tools)] == [False, False, False]
    assert image.tokens == text.tokens + MEDIA_TOKENS
    assert tools.tokens > text.tokens + 100
    assert text.at_least <= text.tokens


async def test_tool_calls_and_old_functions_count_as_well() -> None:
    """An agent's history is mostly tool calls: uncounted, its long prompts would go into the short lane."""
    counter = TokenCounter(_model())
    plain = chat_body(TEXT)
    calls = chat_body(TEXT)
    calls["messages"].append({"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 4000}}]})
    functions = chat_body(TEXT, functions=[{"name": "f", "description": "x" * 4000}])
    base = (await counter.count(parsed(plain))).tokens
    for body in (calls, functions):
        assert (await counter.count(parsed(body))).tokens > base + 900


@pytest.mark.parametrize(
    ("per_byte", "per_message"), [(1 / 3.2, 4.0), (1 / 4.5, 11.0), (1.0, 3.0), (0.3, 30.0), (1 / 9, 0.0)]
)
async def test_without_a_tokenizer_the_estimate_learns_the_engines_own_count(
    per_byte: float, per_message: float
) -> None:
    """An estimate that stays wrong puts every request of a language or a model into the wrong lane."""
    counter = TokenCounter(_model())
    draw = random.Random(7)
    errors = []
    for i in range(200):
        body = chat_body("x" * draw.choice([5, 40, 300, 1500, 9000]))
        body["messages"] *= draw.choice([1, 2, 5])
        request = parsed(body)
        size = sum(len(text) for text in request.prompt.texts)
        actual = max(1, round(per_byte * size + per_message * len(body["messages"]) * draw.uniform(0.95, 1.05)))
        error = counter.learn(request, (await counter.count(request)).tokens, actual)
        if i >= 100:
            errors.append(abs(error))
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert sorted(errors)[int(len(errors) * 0.95)] < 0.12
    assert counter.bytes_per_token == pytest.approx(1 / per_byte, rel=0.05)


async def test_short_chats_alone_do_not_spoil_the_estimate_of_the_first_long_prompt() -> None:
    """A template's 30 tokens taken for the text's own would make a page of text look like a book."""
    counter = TokenCounter(_model())
    for _ in range(100):
        request = parsed(chat_body("Hi there"))
        counter.learn(request, (await counter.count(request)).tokens, 32)
    short = await counter.count(parsed(chat_body("Hi there")))
    long = await counter.count(parsed(chat_body(TEXT * 100)))
    assert short.tokens == pytest.approx(32, rel=0.1)
    assert long.tokens <= len(TEXT) * 100 * 1.0
    assert long.tokens < 3 * len(TEXT) * 100 / 4


async def test_with_a_tokenizer_the_templates_tokens_are_learned_whatever_is_under_way(tokenizer_file: Path) -> None:
    """Answers come back late: if each corrected what the ones before it had corrected already, the estimate would run
    away under load."""
    counter = TokenCounter(_model(tokenizer_file))
    requests = [parsed(chat_body(TEXT * (1 + i % 3))) for i in range(60)]
    estimates = [(await counter.count(request)).tokens for request in requests]
    text = [_true_count(tokenizer_file, TEXT * (1 + i % 3), special=False) for i in range(60)]
    for request, estimate, tokens in zip(requests, estimates, text, strict=True):
        counter.learn(request, estimate, tokens + 17)
    assert counter.tokens_per_message == pytest.approx(17, abs=0.5)
    assert (await counter.count(requests[0])).tokens == pytest.approx(text[0] + 17, abs=1)
    assert counter.bytes_per_token == pytest.approx(len(TEXT) / text[0], rel=0.05)


async def test_an_answers_error_is_that_of_its_estimate_and_has_a_sign() -> None:
    """The exported error says whether prompts are taken for longer or for shorter than they are."""
    counter = TokenCounter(_model())
    request = parsed(completion_body(TEXT))
    assert counter.learn(request, 150, 100) == pytest.approx(0.5)
    assert counter.learn(request, 50, 100) == pytest.approx(-0.5)


async def test_requests_under_way_are_forgotten_with_their_end(tokenizer_file: Path) -> None:
    """What is kept per request and not let go is a leak that ends the gateway after some days."""
    counter = TokenCounter(_model(tokenizer_file))
    for _ in range(50):
        await counter.count(parsed(chat_body(TEXT)))
    assert len(counter._text_tokens) == 0


@given(
    answers=st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(0, 500), st.integers(-5, 10**12)), min_size=1, max_size=60
    ),
    size=st.integers(1, 10**6),
)
def test_no_engine_however_wrong_its_counts_can_push_the_estimate_out_of_bounds(
    answers: list[tuple[int, int, int]], size: int
) -> None:
    """One replica that reports nonsense must not send every request of its model into the wrong lane."""
    fit = PromptFit(0.25, weight=1.0, bounds=(1 / 16, 1.0))
    for units, messages, actual in answers:
        fit.learn(units, messages, actual)
        assert 1 / 16 <= fit.per_unit <= 1.0
        assert 0 <= fit.per_message <= MOST_PER_MESSAGE
    assert size / 16 <= fit.tokens(size, 0) <= size


def test_nonsense_leaves_no_trace_in_what_was_learned() -> None:
    """A replica that counts 1 token for every prompt must not make the others' estimates worse."""
    fit = PromptFit(0.25, weight=1.0, bounds=(1 / 16, 1.0))
    for size in (100, 1000, 4000) * 20:
        fit.learn(size, 1, round(size / 3) + 5)
    before = fit.per_unit, fit.per_message
    for nonsense in (0, -1, 1, 10**12):
        fit.learn(4000, 1, nonsense)
    assert (fit.per_unit, fit.per_message) == before


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A wrong path must end the start with its reason, not the first request."""
    with pytest.raises(ValueError, match=r"models\[tiny\]\.tokenizer: .*expected a tokenizer.json"):
        TokenCounter(_model(tmp_path))
