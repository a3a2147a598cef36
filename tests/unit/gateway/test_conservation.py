"""Every request ends in exactly one outcome and leaves nothing behind, whenever and however it is interrupted.

Without this, counts of what runs creep up until a gateway refuses everything at 3 a.m. with idle engines behind it.
`tests/slow/test_conservation_at_length.py` does the same with 10,000 requests.
"""

from pathlib import Path

import pytest

from tests.fixtures.conservation import KINDS, Interruption, Kind, bench, sweep

STRIDE = 3
"""Every third step of the loop: the slow version takes every one."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_request_interrupted_anywhere_leaves_nothing_behind(kind: Kind, tmp_path: Path) -> None:
    """Lost: seats, connections and counts that are never given back."""
    async with bench(tmp_path / "log", kind.comments) as made:
        for interruption in Interruption:
            assert await sweep(made, kind, interruption, STRIDE) > 0
