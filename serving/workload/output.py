"""Standard output of the commands: tables for a person, JSON for a program."""

import sys
from typing import Any

import orjson
from rich.console import Console

PIPED_COLUMNS = 180


def console_of_width() -> Console:
    """A console for tables: where nobody looks at a terminal, wide enough that no column is cut."""
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def print_json(value: Any) -> None:
    """JSON of plain values and dataclasses. +∞ has no form in JSON and becomes null."""
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")
    sys.stdout.buffer.flush()
