"""Many streams at once at one replica: `python -m tests.bench.many_streams URL [STREAMS]`.

Counts what arrived, and meanwhile asks `/health` twenty times a second: its latency shows how long the server's event
loop was busy with other things.
"""

import asyncio
import statistics
import sys
import time

import aiohttp

OUTPUT_TOKENS = 32
PROMPT = "How long does it take until the first word is there? "


async def stream(session: aiohttp.ClientSession, url: str, model: str, number: int) -> tuple[int, float]:
    """Content chunks received, and seconds to the first."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} {PROMPT}"}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    first = 0.0
    count = 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for data in reply.content.iter_any():
            chunks = data.count(b'"delta":{"content":')
            if chunks and not first:
                first = time.perf_counter() - began
            count += chunks
    return count, first


async def watch(session: aiohttp.ClientSession, url: str, seen: list[float]) -> None:
    """Latencies of `/health` until cancelled, seconds."""
    while True:
        began = time.perf_counter()
        async with session.get(f"{url}/health") as reply:
            await reply.read()
        seen.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


async def main(url: str, streams: int) -> None:
    """Prints what arrived."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        async with session.get(f"{url}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        seen: list[float] = []
        health = asyncio.create_task(watch(session, url, seen))
        began = time.perf_counter()
        results = await asyncio.gather(
            *(stream(session, url, model, number) for number in range(streams)), return_exceptions=True
        )
        took = time.perf_counter() - began
        health.cancel()
    whole = [result for result in results if not isinstance(result, BaseException) and result[0] == OUTPUT_TOKENS]
    firsts = [first * 1000 for _, first in whole]
    seen.sort()
    print(f"{len(whole)} of {streams} streams whole, in {took:.1f} s, {len(whole) * OUTPUT_TOKENS / took:.0f} tokens/s")
    print(f"TTFT ms: median {statistics.median(firsts):.0f}, max {max(firsts):.0f}")
    print(f"/health ms: median {statistics.median(seen) * 1000:.1f}, p99 {seen[int(0.99 * len(seen))] * 1000:.1f}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m tests.bench.many_streams URL [STREAMS]")
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 2000))
