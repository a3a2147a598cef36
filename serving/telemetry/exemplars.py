"""Which observations may carry an exemplar: at most one per histogram, lane, bucket and period.

Every trace that an exemplar points at must be kept by the collector, so without a limit every trace would be.
"""

from bisect import bisect_left


class ExemplarLimit:
    """One histogram's limit. Not thread-safe: it lives on the event loop."""

    def __init__(self, bounds: tuple[float, ...], every: float) -> None:
        """`bounds`: the histogram's; `every`: seconds between two exemplars of one lane and bucket."""
        self._bounds = bounds
        self._every = every
        self._free_at: dict[tuple[str, int], float] = {}

    def take(self, lane: str, value: float, now: float) -> bool:
        """Whether `value` may carry one; if so, its bucket is closed for the period. `now`: monotonic seconds."""
        slot = (lane, bisect_left(self._bounds, value))
        if now < self._free_at.get(slot, now):
            return False
        self._free_at[slot] = now + self._every
        return True
