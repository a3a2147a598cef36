"""Scaling latency, measured: from a lane's queue age first breaking its objective to a new replica being ready."""

from collections.abc import Callable

from serving.spec import Spec


class ScalingWatch:
    """Told of queue ages (every second) and of replicas that become ready. Clock passed in, seconds."""

    def __init__(self, spec: Spec, scaled: Callable[[str, str, float], None]) -> None:
        """`scaled(model, pool, seconds)` is called for each measured latency."""
        self._scaled = scaled
        self._broken_since: dict[tuple[str, str], float] = {}
        self._last_broken: dict[tuple[str, str], float] = {}
        self.set_spec(spec)

    def set_spec(self, spec: Spec) -> None:
        """Objectives and window of a new spec; of queues that it no longer has nothing is measured."""
        self._objectives = {lane.name: lane.ttft.seconds for lane in spec.lanes}
        self._window = spec.rollout.window
        queues = {(model.name, pool) for model in spec.models for pool in model.pools}
        self._broken_since = {key: since for key, since in self._broken_since.items() if key in queues}
        self._last_broken = {key: last for key, last in self._last_broken.items() if key in queues}

    def queue_age(self, model: str, pool: str, lane: str, age: float, now: float) -> None:
        """The age of a lane's oldest queued request, seconds."""
        key = (model, pool)
        if age > self._objectives.get(lane, float("inf")):
            self._broken_since.setdefault(key, now)
            self._last_broken[key] = now
        elif key in self._broken_since and now - self._last_broken[key] > self._window:
            del self._broken_since[key]  # a whole window without a breach: the load went away by itself

    def replica_ready(self, pool: str, now: float) -> None:
        """A replica became ready; ends the measurement of every model that waited for the pool."""
        for key in [key for key in self._broken_since if key[1] == pool]:
            self._scaled(*key, now - self._broken_since.pop(key))
