"""Makes a tiny Llama with random weights: ``python serving/engine/tiny_model.py DIR [--name laneway-tiny]``.

What it writes is a model folder like any other (configuration, weights, ``tokenizer.json``, chat template), small
enough for vLLM to serve on one CPU core, so the whole request path can be run on a machine without a GPU. The text it
produces means nothing: a client that wants a certain length sends ``ignore_eos``. It runs in the engine's environment,
and outside of its functions it imports only the standard library. The same seed gives the same folder.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 512
"""Tokens, the byte alphabet and the specials included."""
POSITIONS = 8192
LAYERS = 4
HIDDEN = 256
HEADS = 4
STAMP = "laneway-model.json"
"""Written last: a folder that holds it with the same recipe is complete."""

SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] if message['role'] in "
    "['system', 'user', 'assistant', 'tool'] else 'user' }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CORPUS = (
    "The first thing that a person notices is how long it takes until something happens on the screen.",
    "When a request arrives, it is measured, given a lane, and placed in the queue where it waits for its turn.",
    "Please summarise the following report in three sentences, and list the open questions at the end.",
    "What is the difference between the median and the mean, and when should one be used instead of the other?",
    "In the morning the trains are full, in the evening they are late, and on Sundays there are hardly any.",
    "Write a function that reads a file line by line and returns the number of words in each of them.",
    "def count_words(path):\n    with open(path) as file:\n        return [len(line.split()) for line in file]\n",
    "The quick answer is yes; the longer answer depends on the size of the batch and the length of the prompt.",
    "She said that there would be enough time for the others, but nobody was going to wait for them any longer.",
    "Our service stores the data for thirty days, after which it is deleted from every system that has a copy.",
    "You are a helpful assistant. Answer briefly, and say so if you do not know the answer to the question.",
    "for (int i = 0; i < n; i++) { total += values[i]; }\nif (total > 100) { return true; }\n",
    '{"name": "example", "version": 1, "items": ["one", "two", "three"], "enabled": true, "limit": 1000}',
    "On 12 March 2024 the company reported revenue of 4,560 million, which is 7.5 percent more than the year before.",
    "Water expands when it freezes, so the pipes under the house should be emptied before the winter comes.",
    "Could you explain this error message to me? It says that the connection was refused by the other side.",
    "Many of these people have worked here for more than twenty years, and their knowledge is not written down.",
    "Translate the text into German and keep the names of the places, the numbers and the dates as they are.",
)
"""What the merges are learned from: prose, questions, code and numbers, so that all of them shrink by about a half."""


def recipe(name: str, seed: int) -> dict[str, object]:
    """What a folder was made from; two equal recipes give equal folders."""
    return {
        "name": name,
        "seed": seed,
        "vocabulary": VOCABULARY,
        "positions": POSITIONS,
        "layers": LAYERS,
        "hidden": HIDDEN,
        "revision": 1,
    }


def is_complete(folder: Path, name: str, seed: int = 0) -> bool:
    """Whether `folder` holds exactly this model."""
    try:
        return bool(json.loads((folder / STAMP).read_text(encoding="utf-8")) == recipe(name, seed))
    except (OSError, ValueError):
        return False


def make(folder: Path, name: str = "laneway-tiny", seed: int = 0) -> None:
    """Writes the model to `folder` ; one that is complete is left alone, another is replaced. Takes 5-15 s.

    Raises:
        ModuleNotFoundError: torch, transformers or tokenizers is not there (they are in the engine's environment).
    """
    if is_complete(folder, name, seed):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two replicas may start at once: each makes its own copy, and the first to finish gives it the name.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        _write(Path(work) / "model", name, seed)
        if folder.is_dir() and not is_complete(folder, name, seed):
            folder.rename(Path(work) / "outdated")
        try:
            (Path(work) / "model").rename(folder)
        except OSError:
            if not is_complete(folder, name, seed):
                raise


def _write(folder: Path, name: str, seed: int) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    _write_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        bos_token_id=SPECIALS.index("<s>"),
        eos_token_id=SPECIALS.index("</s>"),
        pad_token_id=SPECIALS.index("</s>"),
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / STAMP).write_text(json.dumps(recipe(name, seed)) + "\n", encoding="utf-8")


def tokenizer() -> "Tokenizer":
    """The model's tokenizer: byte-level BPE, about two bytes a token. Needs `tokenizers` only, and 20 ms.

    Raises:
        ValueError: the corpus gave fewer tokens than the vocabulary has.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    if made.get_vocab_size() != VOCABULARY:
        raise ValueError(f"vocabulary has {made.get_vocab_size()} tokens, expected {VOCABULARY}: corpus too small")
    # The beginning-of-text token is set before a bare prompt, as Llama's own tokenizer does.
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", SPECIALS.index("<s>"))]
    )
    return made


def chat_prompt(messages: Iterable[tuple[str, str]]) -> str:
    """What `CHAT_TEMPLATE` makes of (role, text) pairs; to be tokenized without further special tokens."""
    turns = [f"<|{role if role in ROLES else 'user'}|>\n{text}\n" for role, text in messages]
    return "".join((SPECIALS[0], *turns, "<|assistant|>\n"))


def _write_tokenizer(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # A script's own folder comes first on the path, and this one holds a `vllm.py`.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description="Makes a tiny Llama with random weights.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--name", default="laneway-tiny", help="recorded in the folder")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args()
    try:
        make(options.folder, options.name, options.seed)
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing.name} is not installed here: run this with the engine's python (`make engine-cpu`)")
