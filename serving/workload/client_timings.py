"""Tells the gateway what the client saw of each request (`POST /v1/client-timings`), after the load."""

import asyncio
from collections.abc import Iterator, Sequence

import aiohttp
import orjson

from serving.timeline import Outcome, Timeline
from serving.workload.probe import api_url

AT_ONCE = 8
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


async def report_timings(
    session: aiohttp.ClientSession, target: str, key: str | None, timelines: Sequence[Timeline]
) -> tuple[int, int]:
    """(reports sent, reports accepted). Seconds count from sending, as the gateway's do from receipt."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    url = f"{api_url(target)}/client-timings"
    reports = _reports(timelines)
    counts = [0, 0]

    async def work() -> None:
        for report in reports:
            counts[0] += 1
            try:
                async with session.post(url, data=report, headers=headers, timeout=_TIMEOUT) as response:
                    await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            counts[1] += response.status < 300

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return counts[0], counts[1]


def _reports(timelines: Sequence[Timeline]) -> Iterator[bytes]:
    for timeline in timelines:
        sent, first, closed = timeline.sent, timeline.first_token, timeline.closed
        if timeline.outcome is Outcome.COMPLETED and sent is not None and first is not None and closed is not None:
            report = {"request_id": timeline.request_id, "ttft": first - sent, "total": closed - sent}
            yield orjson.dumps(report)
