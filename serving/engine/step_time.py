"""How long one engine step takes: a linear model of what is in it, and the profile file that holds its coefficients.

Fitted on 88,100 steps of vLLM 0.32 (R² 0.976; tokens alone reach 0.80): what the attention of a long prompt costs is
the product of the chunk and the context before it, so a cap on tokens is no cap on time. The form carries over from
one machine to another; the coefficients do not, and are calibrated there.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


class ProfileError(ValueError):
    """A profile is refused; the message has the file, the field, the value and what was expected."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A replica's speed and memory. Times in milliseconds."""

    step_ms: float = 1.87
    """Of every step, whatever is in it."""
    prefill_token_ms: float = 0.0133
    """Per prompt token computed."""
    decode_ms: float = 0.073
    """Per sequence that decodes."""
    decode_context_ms: float = 1.9e-4
    """Per token of context of the sequences that decode."""
    attention_ms: float = 2.5e-5
    """Per prompt token computed and token of context, the context taken at the chunk's middle."""
    prefill_ms: float = 0.83
    """Per chunk of a prompt."""
    request_ms: float = 2.5
    """Per request before it is queued, beyond what the simulated replica's own server takes. vLLM hands over between
    processes; this is the rest of an idle replica's TTFT, 7.0 ms at 16 prompt tokens, of which 4.5 are explained."""
    block_size: int = 128
    """Tokens of a KV block. 128 is vLLM's on a CPU, 16 its default on a GPU."""
    kv_blocks: int = 2048
    """KV blocks, the null block included: 1 GiB for the tiny model on a CPU."""

    def step_seconds(
        self, prefill_tokens: int, prefill_chunks: int, chunk_context: float, decodes: int, decode_context: int
    ) -> float:
        """Seconds of a step.

        Args:
            prefill_tokens: prompt tokens computed in it.
            prefill_chunks: chunks that they come in.
            chunk_context: sum over the chunks of tokens × context at the chunk's middle (tokens²).
            decodes: sequences that produce their next token.
            decode_context: sum of their contexts (tokens).
        """
        return (
            self.step_ms
            + self.prefill_token_ms * prefill_tokens
            + self.prefill_ms * prefill_chunks
            + self.attention_ms * chunk_context
            + self.decode_ms * decodes
            + self.decode_context_ms * decode_context
        ) / 1000.0


DEFAULT = Profile()


def parse(data: Any, source: str) -> Profile:
    """The profile of a JSON object; a field that is left out has its default.

    Raises:
        ProfileError: an unknown field, or a value that is no number in range.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(f"{source}: got {type(data).__name__}, expected an object of coefficients")
    known = {item.name for item in fields(Profile)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in _ABOUT:
            continue
        if name not in known:
            raise ProfileError(
                f"{source}: {name}: got {_short(value)}, expected no such field; there are {_list(known)}"
            )
        least = _LEAST.get(name)
        if least is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ProfileError(
                    f"{source}: {name}: got {_short(value)}, expected a whole number of at least {least}"
                )
            values[name] = value
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ProfileError(f"{source}: {name}: got {_short(value)}, expected milliseconds of at least 0")
            values[name] = float(value)
    profile = Profile(**values)
    if profile.step_ms == 0:
        raise ProfileError(f"{source}: step_ms: got 0, expected more: a step that takes no time would never end")
    return profile


def load(path: Path) -> Profile:
    """Reads a profile file.

    Raises:
        ProfileError: it cannot be read, is not JSON, or `parse` refuses it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}), expected a JSON file") from None
    except ValueError as error:
        raise ProfileError(f"{path}: is not JSON: {error}") from None
    return parse(data, str(path))


def dump(profile: Profile, about: Mapping[str, Any] | None = None) -> str:
    """The profile's file; `about` (what was measured, on what, how well it fits) goes in front under `about`."""
    body = asdict(profile)
    return json.dumps(body if about is None else {"about": dict(about), **body}, indent=2) + "\n"


_ABOUT = {"about"}
_LEAST = {"block_size": 1, "kv_blocks": 2}


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
