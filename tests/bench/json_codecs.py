"""JSON codecs on chat bodies of three sizes: µs to decode and to encode, the best of five rounds, as a table.

`python -m tests.bench.json_codecs`; msgspec is measured where it is installed.
"""

import importlib
import json
import timeit
from collections.abc import Callable
from typing import Any

import orjson

SIZES = (1_000, 30_000, 1_000_000)
LINE = 'The quick brown fox says "hi".\n'
BYTES_PER_ROUND = 2_000_000


def main() -> None:
    """Prints the table."""
    codecs: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
        "orjson": (orjson.loads, orjson.dumps),
        "json": (json.loads, lambda value: json.dumps(value).encode()),
    }
    try:
        msgspec = importlib.import_module("msgspec.json")
    except ImportError:
        print("msgspec is not installed here: left out")
    else:
        codecs["msgspec"] = (msgspec.Decoder().decode, msgspec.Encoder().encode)
    print(f"{'bytes':>9}  {'codec':8} {'decode µs':>10} {'encode µs':>10}")
    for size in SIZES:
        raw = json.dumps(_body(size)).encode()
        value = orjson.loads(raw)
        for name, (decode, encode) in codecs.items():
            print(f"{len(raw):9}  {name:8} {_micros(decode, raw):10.1f} {_micros(encode, value):10.1f}")


def _body(size: int) -> dict[str, Any]:
    return {
        "model": "laneway-tiny",
        "messages": [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": LINE * (size // len(LINE))},
        ],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }


def _micros(call: Callable[[Any], Any], argument: Any) -> float:
    rounds = max(10, BYTES_PER_ROUND // len(argument if isinstance(argument, bytes) else orjson.dumps(argument)))
    return min(timeit.repeat(lambda: call(argument), number=rounds, repeat=5)) / rounds * 1e6


if __name__ == "__main__":
    main()
