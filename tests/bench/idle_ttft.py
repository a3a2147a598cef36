"""TTFT and time per output token of idle replicas by prompt length: `python -m tests.bench.idle_ttft URL [URL …]`.

One request at a time, each with a prompt of its own (random tokens, so that no prefix cache helps), the replicas in
turn within a round. What a calibrated simulated replica shows here should be what the real one shows.
"""

import http.client
import json
import random
import statistics
import sys
import time
from urllib.parse import urlsplit

PROMPT_TOKENS = (16, 512, 2048, 6000)
ROUNDS = 15
OUTPUT_TOKENS = 16
VOCABULARY = (10, 500)


def measure(address: str, model: str, tokens: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and per further token."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.connect()
    body = {"model": model, "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    text = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", text, {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{address}: status {reply.status}")
    first = last = 0.0
    while line := reply.readline():
        if line.startswith(b'data: {"id"'):
            last = time.perf_counter()
            first = first or last
    connection.close()
    return first - began, (last - first) / (OUTPUT_TOKENS - 1)


def main(urls: list[str]) -> None:
    """Prints the table."""
    addresses = [urlsplit(url).netloc for url in urls]
    models = []
    for address in addresses:
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", "/v1/models")
        models.append(json.loads(connection.getresponse().read())["data"][0]["id"])
    draw = random.Random(time.time_ns())
    print(f"one request at a time, {ROUNDS} rounds, milliseconds: median (p90)")
    print(f"{'prompt tokens':>14}" + "".join(f"  {'TTFT ' + address:>32}{'TPOT':>8}" for address in addresses))
    for length in PROMPT_TOKENS:
        seen: list[list[tuple[float, float]]] = [[] for _ in addresses]
        for _ in range(ROUNDS):
            for times, address, model in zip(seen, addresses, models, strict=True):
                times.append(measure(address, model, [draw.randrange(*VOCABULARY) for _ in range(length)]))
        cells = ""
        for times in seen:
            firsts = sorted(first * 1000 for first, _ in times[1:])
            p90 = firsts[int(0.9 * len(firsts))]
            tpot = statistics.median(between * 1000 for _, between in times[1:])
            cells += f"  {f'{statistics.median(firsts):.1f} ({p90:.1f})':>32}{tpot:>8.2f}"
        print(f"{length:>14}{cells}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.bench.idle_ttft URL [URL …]")
    main(sys.argv[1:])
