"""Prompts: as long as the trace says, and known to no cache unless the trace shares them."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from serving.workload.prompts import Cost, PromptMaker, TokenizerError, vocabulary
from serving.workload.trace import TraceRequest


def trained(path: Path, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words = vocabulary()
    common = [*words[:20], *(word.strip() for word in words[:20])] * 50
    tokenizer.train_from_iterator([*words, *(word.strip() for word in words), *common, "".join(words)], trainer)
    file = path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As vLLM's models have it: words do not join across spaces."""
    return trained(tmp_path_factory.mktemp("byte_level"), pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose tokens cross spaces: counts of words do not add up to the count of the text."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(tmp_path_factory.mktemp("joining"), byte_level)


def test_both_kinds_of_tokenizer_are_really_met(byte_level: Path, joining: Path) -> None:
    """If both fixtures took the same way, the other one would be untested."""
    assert PromptMaker("x", Cost(4.0), byte_level).counts_words
    assert not PromptMaker("x", Cost(4.0), joining).counts_words


@pytest.mark.parametrize("tokens", [1, 2, 64, 511, 512, 3000])
@pytest.mark.parametrize("kind", ["byte_level", "joining"])
def test_a_prompt_has_exactly_the_wanted_tokens(kind: str, tokens: int, request: pytest.FixtureRequest) -> None:
    """A prompt one token too long can land in another lane."""
    file = request.getfixturevalue(kind)
    maker = PromptMaker("salt", Cost(4.0), file)
    text = maker.prompt(TraceRequest(0.0, tokens, 1), 0)
    assert len(Tokenizer.from_file(str(file)).encode(text).ids) == tokens


def test_the_template_is_paid_from_the_prompt(byte_level: Path) -> None:
    """The engine counts its chat template too; the trace's length is what it must come to."""
    text = PromptMaker("salt", Cost(4.0, template_tokens=12), byte_level).prompt(TraceRequest(0.0, 100, 1), 0)
    assert len(Tokenizer.from_file(str(byte_level)).encode(text).ids) == 88


def test_without_a_tokenizer_the_length_follows_the_measured_bytes() -> None:
    """The probe's figure must be used, or every prompt is off by the same factor."""
    text = PromptMaker("salt", Cost(bytes_per_token=2.5, template_tokens=10)).prompt(TraceRequest(0.0, 2010, 1), 0)
    assert len(text) == pytest.approx(5000, abs=4)


def test_no_two_prompts_begin_alike_and_another_run_has_its_own() -> None:
    """A prefix cache that knows a prompt answers in a tenth of the time: the benchmark would measure the cache."""
    first, second = PromptMaker("1:run-a", Cost(4.0)), PromptMaker("1:run-b", Cost(4.0))
    request = TraceRequest(0.0, 64, 1)
    beginnings = [maker.prompt(request, number)[:40] for maker in (first, second) for number in range(200)]
    assert len(set(beginnings)) == 400


def test_the_same_run_makes_the_same_text() -> None:
    """A run that cannot be made again cannot be looked into."""
    request = TraceRequest(0.0, 64, 1)
    assert PromptMaker("x", Cost(4.0)).prompt(request, 3) == PromptMaker("x", Cost(4.0)).prompt(request, 3)


@pytest.mark.parametrize("kind", ["byte_level", "joining"])
def test_equal_blocks_are_equal_text_and_the_rest_is_not(kind: str, request: pytest.FixtureRequest) -> None:
    """Shared prefixes must hit the cache for as many tokens as they did where they were recorded, and no more."""
    file = request.getfixturevalue(kind)
    maker = PromptMaker("x", Cost(4.0), file)
    tokenizer = Tokenizer.from_file(str(file))

    def ids(request: TraceRequest, number: int) -> list[int]:
        return list(tokenizer.encode(maker.prompt(request, number)).ids)

    one = ids(TraceRequest(0.0, 1100, 1, prefix=(7, 8, 9)), 0)
    two = ids(TraceRequest(0.0, 1300, 1, prefix=(7, 8, 10)), 1)
    same = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert (len(one), len(two)) == (1100, 1300)
    assert 1020 <= same < 1030


def test_a_cut_block_is_the_beginning_of_the_whole_one(byte_level: Path) -> None:
    """The last block of a Mooncake prompt is a part of one that a longer prompt has in full."""
    maker = PromptMaker("x", Cost(4.0), byte_level)
    short = maker.prompt(TraceRequest(0.0, 300, 1, prefix=(7,)), 0)
    long = maker.prompt(TraceRequest(0.0, 512, 1, prefix=(7,)), 1)
    assert long.startswith(short[: int(len(short) * 0.95)])


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error must name the file, not a line of a foreign library."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read .* expected a tokenizer\.json"):
        PromptMaker("x", Cost(4.0), tmp_path)
