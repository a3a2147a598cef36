"""The shipped spec, edited: what the tests of refusals start from."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.spec import SpecError, parse

ROOT = Path(__file__).parents[2]


def shipped() -> dict[str, Any]:
    """The repository's own file, as plain values."""
    data = yaml.safe_load((ROOT / "laneway.yaml").read_text())
    assert isinstance(data, dict)
    return data


def with_value(path: str, value: Any) -> str:
    """The shipped file with one value changed; `path` as in refusals, `~` for a field to be taken out."""
    data = shipped()
    steps = [int(step) if step.isdigit() else step for step in path.replace("[", ".").replace("]", "").split(".")]
    place: Any = data
    for step in steps[:-1]:
        place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
    if value == "~":
        del place[steps[-1]]
    else:
        place[steps[-1]] = value
    return yaml.safe_dump(data)


def problems_of(text: str) -> list[str]:
    """The lines that a text is refused with."""
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert str(caught.value) == "\n".join(f"laneway.yaml: {problem}" for problem in caught.value.problems)
    return caught.value.problems
