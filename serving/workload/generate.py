"""Seeded traces of the two situations that matter: short requests behind long ones, and bursts on a steady stream.

A mix is named where a trace is expected: `mix:short-behind-long?short=8&long=1.2&seconds=40`. The same name and seed
always give the same trace.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl

from serving.workload.trace import Tier, Trace, TraceError, TraceRequest

SCHEME = "mix:"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly between both bounds."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class ShortBehindLong:
    """Chat turns that share an engine with long prompts and with bursts of batch work.

    Lengths are of the measured prototype (40 s at 8 short and 1.2 long a second kept its engine about 80 % busy, 1.8
    long about 93 %): calibrate the rates to your engine by its busy share.
    """

    seconds: float = 60.0
    """Length of the trace, s."""
    short: float = 8.0
    """Short prompts (64-100 tokens, 16-32 out) a second, Poisson."""
    long: float = 1.2
    """Long prompts (3000-7000 tokens, 32 out) a second, Poisson."""
    burst: float = 8.0
    """Batch requests (500-2000 tokens, 64-128 out, tier flex) of one burst, at once."""
    every: float = 10.0
    """Seconds between two bursts; the first comes after 1 s."""

    def requests(self, rng: random.Random) -> Iterator[TraceRequest]:
        yield from _poisson(rng, self.short, 0.0, self.seconds, Lengths(64, 100), Lengths(16, 32))
        yield from _poisson(rng, self.long, 0.0, self.seconds, Lengths(3000, 7000), Lengths(32, 32))
        at = 1.0
        while at < self.seconds:
            yield from _clump(rng, round(self.burst), at, Lengths(500, 2000), Lengths(64, 128), "flex")
            at += self.every


@dataclass(frozen=True, slots=True)
class SteadyBurst:
    """A steady stream of chat turns, on which bursts of the same kind fall."""

    seconds: float = 60.0
    """Length of the trace, s."""
    rate: float = 5.0
    """Requests (64-1500 tokens, 16-96 out) a second, Poisson, all the time."""
    burst: float = 20.0
    """Requests a second on top, Poisson, while a burst lasts."""
    every: float = 20.0
    """Seconds from one burst's start to the next; the first starts after half of it."""
    lasts: float = 3.0
    """Seconds that a burst lasts."""

    def requests(self, rng: random.Random) -> Iterator[TraceRequest]:
        prompt, output = Lengths(64, 1500), Lengths(16, 96)
        yield from _poisson(rng, self.rate, 0.0, self.seconds, prompt, output)
        at = self.every / 2
        while at < self.seconds:
            yield from _poisson(rng, self.burst, at, min(at + self.lasts, self.seconds), prompt, output)
            at += self.every


MIXES: dict[str, Callable[..., ShortBehindLong | SteadyBurst]] = {
    "short-behind-long": ShortBehindLong,
    "steady-burst": SteadyBurst,
}


def generate(name: str, seed: int) -> Trace:
    """The trace of `mix:NAME?parameter=value&…`.

    Raises:
        TraceError: there is no such mix or parameter, a value is not a number in its bounds, or no request comes out.
    """
    kind, _, query = name.removeprefix(SCHEME).partition("?")
    if kind not in MIXES:
        raise TraceError(f"{name}: got mix {kind!r}, expected one of {', '.join(MIXES)}")
    defaults = MIXES[kind]()
    known = [field.name for field in fields(defaults)]
    values: dict[str, float] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in known:
            raise TraceError(f"{name}: got parameter {key!r}, expected one of {', '.join(known)}")
        values[key] = _value(name, key, text)
    mix = MIXES[kind](**values)
    requests = sorted(mix.requests(random.Random(f"{kind}:{seed}")), key=lambda request: request.arrival)
    if not requests:
        raise TraceError(f"{name}: gives no request, expected a higher rate or a longer time")
    return Trace(name, "generated", tuple(requests))


def describe() -> str:
    """Every mix with its parameters and their defaults, for `--help`."""
    return "; ".join(
        f"{SCHEME}{name}?" + "&".join(f"{field.name}={field.default:g}" for field in fields(mix()))
        for name, mix in MIXES.items()
    )


def _value(name: str, key: str, text: str) -> float:
    # The bounds keep a slip of the finger from filling the memory; a burst or rate of 0 switches that part off.
    low, high = (0.1, 86_400.0) if key in ("seconds", "every", "lasts") else (0.0, 10_000.0)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise TraceError(f"{name}: {key}: got {text!r}, expected a number from {low:g} to {high:g}")
    return value


def _poisson(
    rng: random.Random, rate: float, start: float, end: float, prompt: Lengths, output: Lengths
) -> Iterator[TraceRequest]:
    at = start
    while rate > 0:
        at += rng.expovariate(rate)
        if at >= end:
            return
        yield TraceRequest(at, prompt.draw(rng), output.draw(rng))


def _clump(
    rng: random.Random, count: int, at: float, prompt: Lengths, output: Lengths, tier: Tier
) -> Iterator[TraceRequest]:
    for _ in range(count):
        yield TraceRequest(at, prompt.draw(rng), output.draw(rng), tier)
