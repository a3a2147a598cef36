"""YAML into strict pydantic models, and out of them, in words: what is wrong at which path, and what each field takes.

Types, units and bounds are told from the models' JSON schema, so that a refusal and `laneway spec --explain` say the
same. What stands below a field that is marked `secret`, or reads like an API key, is told by its length only.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_LIKE_A_KEY = re.compile(r"(?i)\s*(bearer\s+)?(lw|sk)-")
_SHOWN_CHARACTERS = 80


def read_yaml(text: str) -> Any:
    """The plain values of a YAML text; lists come as tuples, which is what strict models take.

    Raises:
        ValueError: it is not YAML, or a key stands twice; one line, without the text itself.
    """
    try:
        return _tuples(yaml.load(text, _UniqueKeyLoader))
    except yaml.MarkedYAMLError as error:  # its own text quotes the line, which may hold a key
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ValueError(" ".join(filter(None, (error.context, error.problem))) + where) from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep, or holds itself") from None
    except (AttributeError, KeyError, TypeError, ValueError):  # what the library's own readers of values let escape
        raise ValueError("a value is not the date, number or flag that it looks like") from None


def refusals(model: type[BaseModel], error: ValidationError) -> list[str]:
    """One line a fault: path, value, what was expected."""
    root = _Schema(model.model_json_schema())
    return [_refusal(root, fault) for fault in error.errors() if not _follows_from_another(fault)]


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Every field as (path, type with unit and bounds, default, meaning), in the models' order."""
    return _Schema(model.model_json_schema()).fields("")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML takes the last of two equal keys and drops the first in silence; here that is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key is no plain value", key.start_mark)
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} stands twice, expected once,", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


class _Schema:
    """A place in a JSON schema: a section, a list, a mapping or a plain value."""

    def __init__(self, schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> None:
        self._definitions: Mapping[str, Any] = schema.get("$defs", {}) if definitions is None else definitions
        choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
        self.nullable = len(choices) < len(schema.get("anyOf", ()))
        merged = {**schema, **(choices[0] if choices else {})}
        if "$ref" in merged:
            merged = {**self._definitions[merged["$ref"].rpartition("/")[2]], **merged}
        self._schema = merged

    def at(self, step: str | int) -> "_Schema | None":
        """What stands at a field's name, a key, or an index; None for a field that does not exist."""
        inner = self._schema.get("items") if isinstance(step, int) else self._schema.get("properties", {}).get(step)
        if inner is None and isinstance(self._schema.get("additionalProperties"), dict):
            inner = self._schema["additionalProperties"]
        return None if inner is None else _Schema(inner, self._definitions)

    @property
    def names(self) -> list[str]:
        """The fields of a section; empty for anything else."""
        return list(self._schema.get("properties", ()))

    @property
    def secret(self) -> bool:
        """What stands here may be a credential."""
        return bool(self._schema.get("secret"))

    @property
    def description(self) -> str:
        """What the field means."""
        return str(self._schema.get("description", ""))

    def text(self) -> str:
        """Type, unit, bounds."""
        schema = self._schema
        if "enum" in schema or "const" in schema:
            text = " | ".join(map(str, schema.get("enum") or [schema["const"]]))
        elif self.names:
            text = "section"
        elif "items" in schema or "additionalProperties" in schema:
            inner = _Schema(schema.get("items") or schema["additionalProperties"], self._definitions)
            what = "sections" if inner.names else inner.text()
            text = f"{'list' if 'items' in schema else 'mapping'} of {what}"
            least = schema.get("minItems") or schema.get("minProperties")
            text += f", at least {least}" if least else ""
        else:
            unit = f" ({schema['unit']})" if "unit" in schema else ""
            bounds = ", ".join(f"{sign} {schema[key]:,}" for key, sign in _BOUNDS if key in schema)
            pattern = f" like {schema['pattern']}" if "pattern" in schema else ""
            text = f"{schema.get('type', 'value')}{unit}{' ' if bounds else ''}{bounds}{pattern}"
        return f"{text}, or null" if self.nullable else text

    def fields(self, prefix: str) -> Iterator[tuple[str, str, str, str]]:
        """Its fields, and theirs."""
        for name in self.names:
            field = self.at(name)
            assert field is not None
            default = "required" if name in self._schema.get("required", ()) else _plain(field._schema.get("default"))
            yield f"{prefix}{name}", field.text(), default, field.description
            item = field.at(0)
            yield from item.fields(f"{prefix}{name}[].") if item and item.names else field.fields(f"{prefix}{name}.")


def _refusal(root: _Schema, fault: Any) -> str:
    location: Sequence[str | int] = fault["loc"]
    if fault["type"] == "invalid_key" or location[-1:] == ("[key]",):
        place = location[: location.index("[key]") - 1] if "[key]" in location else location[:-1]
        return f"{_path(place)}: got a key {_shown(fault['input'])}, expected a string".removeprefix(": ")
    path, got = _path(location), _shown(fault["input"])
    parent, schema = None, root
    secret = False
    for step in location:
        parent, found = schema, schema.at(step)
        if found is None:
            break
        schema, secret = found, secret or found.secret
    if secret and isinstance(fault["input"], str):
        got = _length(fault["input"])
    if fault["type"] == "value_error":
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    if fault["type"] == "extra_forbidden":
        names = ", ".join((parent or root).names)
        return f"{path}: got {got}, expected no such field; there are {names}"
    expected = f"section with {', '.join(schema.names)}" if schema.names else schema.text()
    if fault["type"] == "missing":
        return f"{path}: missing, expected {expected}: {schema.description}"
    return f"{path}: got {got}, expected {expected}"


def _follows_from_another(fault: Any) -> bool:
    """A list whose items are all wrong is called too short on top: those items have their own lines."""
    return fault["type"] == "too_short" and len(fault["input"]) > 0


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _shown(value: Any) -> str:
    """A value as YAML has it; of lists and sections only the size, for who knows what stands in them."""
    if isinstance(value, str):
        return _length(value) if len(value) > _SHOWN_CHARACTERS or _LIKE_A_KEY.match(value) else repr(value)
    if isinstance(value, Mapping):
        return f"a section of {len(value)} fields"
    if isinstance(value, Sequence | set | bytes):
        return f"a list of {len(value)} items"
    return _plain(value)


def _length(value: str) -> str:
    return f"a string of {len(value)} characters"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ""  # a section's defaults stand at its fields
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
