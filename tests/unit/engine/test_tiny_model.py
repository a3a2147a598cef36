"""The tiny model's tokenizer and chat template, which the simulated replica shares."""

import json
from pathlib import Path

import jinja2
import pytest

from serving.engine import tiny_model


def test_text_survives_the_tokenizer_at_about_two_bytes_a_token() -> None:
    """Lanes are chosen by token counts: a tokenizer far from natural would send everything to one lane."""
    tokenizer = tiny_model.tokenizer()
    text = "Latency is what users complain about: they wait in the queue, not on the GPU. Grüße, 東京 🙂\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tiny_model.VOCABULARY
    assert 1.5 < len(text.encode()) / len(ids) < 3.5


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "hi")],
        [("system", "be brief"), ("user", "a\nb"), ("assistant", ""), ("user", "<|user|> {{ x }}")],
        [("someone", "of no known role")],
    ],
)
def test_the_simulated_replica_writes_chats_as_the_model_template_does(messages: list[tuple[str, str]]) -> None:
    """Otherwise the two engines count different prompt tokens for the same request, and cannot be compared."""
    rendered = jinja2.Template(tiny_model.CHAT_TEMPLATE, keep_trailing_newline=True).render(
        messages=[{"role": role, "content": content} for role, content in messages],
        bos_token="<s>",
        add_generation_prompt=True,
    )
    assert tiny_model.chat_prompt(messages) == rendered


def test_only_a_folder_of_the_same_recipe_counts_as_made(tmp_path: Path) -> None:
    """A half-written or outdated folder would be served for ever."""
    assert not tiny_model.is_complete(tmp_path, "laneway-tiny")
    (tmp_path / tiny_model.STAMP).write_text("{")
    assert not tiny_model.is_complete(tmp_path, "laneway-tiny")
    (tmp_path / tiny_model.STAMP).write_text(json.dumps(tiny_model.recipe("laneway-tiny", 0)))
    assert tiny_model.is_complete(tmp_path, "laneway-tiny")
    assert not tiny_model.is_complete(tmp_path, "laneway-tiny", seed=1)
