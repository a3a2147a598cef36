"""Every request ends in exactly one outcome and leaves nothing behind, whenever and however it is interrupted.

Without this, counts of what runs creep up until a gateway refuses everything at 3 a.m. with idle engines behind it.
`tests/slow/test_conservation_at_length.py` does the same with 10,000 requests.
"""

from pathlib import Path
from random import Random

import pytest

from serving.timeline import Outcome
from tests.fixtures.conservation import Interruption, bench, crowd, sweep
from tests.fixtures.request_kinds import KINDS, Kind

STRIDE = 4
"""Every fourth step of the loop: the slow version takes every one."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_request_interrupted_anywhere_leaves_nothing_behind(kind: Kind, tmp_path: Path) -> None:
    """Lost: seats, connections and counts that are never given back."""
    async with bench(tmp_path / "log", kind.comments) as made:
        for interruption in Interruption:
            assert await sweep(made, kind, interruption, STRIDE) > 0
        assert made.outcomes()[Outcome.CANCELLED] > 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_crowd_interrupted_at_random_leaves_nothing_behind(seed: int, tmp_path: Path) -> None:
    """Lost: the same, where requests let each other go."""
    async with bench(tmp_path / "log", places=20) as made:
        await crowd(made, Random(seed), 100)
        await crowd(made, Random(seed + 100), 30)
        outcomes = made.outcomes()
        assert outcomes[Outcome.COMPLETED] > 0
        assert outcomes[Outcome.CANCELLED] > 0
        assert outcomes[Outcome.REJECTED_FULL] > 0
