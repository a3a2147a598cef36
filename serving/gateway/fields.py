"""Named fields of a JSON object, read with their type and range checked.

A refusal names the field, what it holds and what was expected. What it holds is told by type and size; the value
itself is told only of a number with a range and of a string that reads as a name, so that no prompt and no key that was
put into the wrong field comes back in an error or lands in a log.
"""

import re
from collections.abc import Mapping
from typing import Any

from serving.gateway.errors import RequestError
from serving.timeline import Outcome

_NAME = re.compile(r"(?!sk-|lw-)[A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}")
"""What reads as the name of a model or lane. Not what begins as API keys do."""


def refused(param: str | None, message: str, *, code: str | None = None, status: int | None = None) -> RequestError:
    """The error of a request that is not valid. `param` is the field's path, such as `messages[3].content`."""
    return RequestError(Outcome.REJECTED_INVALID, message, param=param, code=code, status=status)


def shown(text: str) -> str:
    """A string as an error may tell it: itself in quotes if it reads as a name, else by its length."""
    return repr(text) if _NAME.fullmatch(text) else f"a string of {len(text)} characters"


def kind_of(value: Any) -> str:
    """What a value is, without a word of what it says."""
    match value:
        case None:
            return "null or missing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)} items"
        case _:
            return "an object"


def string(body: Mapping[str, Any], name: str, path: str = "") -> str | None:
    """A string, or None where it is null or missing. `path` goes before the name in a refusal."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(path + name, f"{path}{name} is {kind_of(value)}, expected a string")
    return value


def boolean(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    """true or false; False where it is null or missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(path + name, f"{path}{name} is {kind_of(value)}, expected true or false")
    return bool(value)


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """An object, or None where it is null or missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refused(name, f"{name} is {kind_of(value)}, expected an object")
    return value


def sequence(body: Mapping[str, Any], name: str, path: str = "") -> list[Any] | None:
    """A list, or None where it is null or missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise refused(path + name, f"{path}{name} is {kind_of(value)}, expected a list")
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`, or None where it is null or missing."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(name, f"{name} is {_scalar(value)}, expected a whole number from {low} to {high}")
    if not low <= value <= high:
        raise refused(name, f"{name} is {value}, expected a whole number from {low} to {high}")
    return value


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from `low` to `high`, or None where it is null or missing."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(name, f"{name} is {kind_of(value)}, expected a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise refused(name, f"{name} is {value}, expected a number from {low:g} to {high:g}")
    return float(value)


def _scalar(value: Any) -> str:
    return f"{value}" if isinstance(value, float) else kind_of(value)
