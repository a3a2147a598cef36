"""10,000 requests, each interrupted at another step of its life: conservation is exact, not nearly so."""

from pathlib import Path
from random import Random

import pytest

from tests.fixtures.conservation import Interruption, bench, crowd, sweep
from tests.fixtures.request_kinds import KINDS

REQUESTS = 10_000

pytestmark = pytest.mark.slow


async def test_ten_thousand_interrupted_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """Lost: a leak of one request in a thousand, which takes a week to stop a gateway."""
    made_requests = 0
    rounds = 0
    while made_requests < REQUESTS:
        for number, kind in enumerate(KINDS):
            async with bench(tmp_path / f"log-{rounds}-{number}", kind.comments) as made:
                for interruption in Interruption:
                    await sweep(made, kind, interruption)
                made_requests += len(made.ids)
        async with bench(tmp_path / f"log-{rounds}", places=100) as made:
            await crowd(made, Random(rounds), 500)
            made_requests += len(made.ids)
        rounds += 1
    print(f"{made_requests} requests in {rounds} rounds")
