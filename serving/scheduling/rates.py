"""Measured rates: how fast a lane drains, how fast a replica computes prompts.

Both are ratios of decayed sums, so that many small samples and one large one weigh by what they measured.
"""

from dataclasses import dataclass
from math import exp, sqrt

DRAIN_TIME_CONSTANT = 10.0
"""Seconds of backlogged time after which a lane's past weighs 1/e: several long prefills, well below an outage."""

MEASURED_AFTER = 2.0
"""Seconds of backlogged time before a drain rate is believed. Releases are lumpy: behind one long prefill a lane
drains nothing for a second."""

PREFILL_TIME_CONSTANT = 30.0
"""Seconds of prefill work after which a replica's past weighs 1/e."""

PREFILL_MEASURED_AFTER = 0.1
"""Seconds of prefill work before a prefill rate is believed."""

DISTINCT_LENGTHS = 0.01
"""Least share of the determinant in the product of its diagonal at which prompts differ enough for a curve."""


class TokenRate:
    """Tokens a second over the time that is counted: EWMA, time constant `DRAIN_TIME_CONSTANT`.

    For a drain rate only backlogged time counts, and only tokens that had to wait: what passes an empty queue says
    nothing about how fast a full one empties. A stall counts for one time constant at most, so that it divides the
    rate by e and never turns into a refusal of everything; the first release after it ends it.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._weight = 0.0
        self._since: float | None = None
        self._stalled = 0.0

    def mark(self, now: float, tokens: int, counting: bool) -> None:
        """`tokens` went at `now`; `counting` says whether time counts from now on."""
        if self._since is not None:
            self._tokens, self._weight = self._decayed(now)
            self._stalled = 0.0 if tokens else self._stalled + now - self._since
            self._tokens += tokens
        self._since = now if counting else None
        if not counting:
            self._stalled = 0.0

    def rate(self, now: float) -> float | None:
        """Tokens a second, above 0; None before it was measured (a stall from the start measures nothing)."""
        tokens, weight = self._decayed(now)
        return tokens / weight if tokens and weight >= _LEAST_WEIGHT else None

    def _decayed(self, now: float) -> tuple[float, float]:
        if self._since is None:
            return self._tokens, self._weight
        elapsed = min(now - self._since, max(0.0, DRAIN_TIME_CONSTANT - self._stalled))
        keep = exp(-elapsed / DRAIN_TIME_CONSTANT)
        return self._tokens * keep, self._weight * keep + DRAIN_TIME_CONSTANT * (1 - keep)


_LEAST_WEIGHT = DRAIN_TIME_CONSTANT * (1 - exp(-MEASURED_AFTER / DRAIN_TIME_CONSTANT))


@dataclass(slots=True)
class PrefillTime:
    """How long a replica computes a prompt: `linear`·n + `curve`·n² seconds for n tokens (attention is quadratic).

    Fitted through the origin by least squares over decayed sums. Until there are prompts of different lengths, or
    where the fit is no growing curve, and always with `curved` off, it is the plain ratio of seconds to tokens.
    """

    curved: bool = False
    _n: float = 0.0
    _t: float = 0.0
    _n2: float = 0.0
    _n3: float = 0.0
    _n4: float = 0.0
    _nt: float = 0.0
    _n2t: float = 0.0
    _fit: tuple[float, float] | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds` of the engine."""
        keep = exp(-seconds / PREFILL_TIME_CONSTANT)
        n = float(tokens)
        self._n = self._n * keep + n
        self._t = self._t * keep + seconds
        if self.curved:
            self._n2 = self._n2 * keep + n**2
            self._n3 = self._n3 * keep + n**3
            self._n4 = self._n4 * keep + n**4
            self._nt = self._nt * keep + n * seconds
            self._n2t = self._n2t * keep + n**2 * seconds
        self._fit = self._fitted() if self._t >= PREFILL_MEASURED_AFTER else None

    @property
    def measured(self) -> bool:
        """It may be asked for seconds and tokens."""
        return self._fit is not None

    def seconds(self, tokens: float) -> float:
        """To compute the first `tokens` of a prompt. Only when `measured`."""
        assert self._fit is not None
        linear, curve = self._fit
        return linear * tokens + curve * tokens**2

    def tokens(self, seconds: float) -> float:
        """How many of a prompt are computed after `seconds`: the inverse. Only when `measured`."""
        assert self._fit is not None
        linear, curve = self._fit
        return 2 * seconds / (linear + sqrt(linear**2 + 4 * curve * seconds))

    @staticmethod
    def rate(*models: "PrefillTime") -> float | None:
        """Tokens a second over all of them; None before it was measured."""
        seconds = sum(model._t for model in models)
        return sum(model._n for model in models) / seconds if seconds >= PREFILL_MEASURED_AFTER else None

    def _fitted(self) -> tuple[float, float]:
        determinant = self._n2 * self._n4 - self._n3**2
        if self.curved and determinant > DISTINCT_LENGTHS * self._n2 * self._n4:
            linear = (self._nt * self._n4 - self._n2t * self._n3) / determinant
            curve = (self._n2t * self._n2 - self._nt * self._n3) / determinant
            if linear > 0 and curve >= 0:
                return linear, curve
        return self._t / self._n, 0.0
