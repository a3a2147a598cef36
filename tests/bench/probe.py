"""Asks a URL for its health until SIGTERM, in a process of its own, and then prints what it saw as JSON.

    python -m tests.bench.probe http://127.0.0.1:8080/healthz

How late the process itself woke up stands beside the latencies: on a full machine that much of a latency is the
probe's own wait for a processor, and no fault of what it asks.
"""

import http.client
import json
import signal
import sys
import time
from types import FrameType
from urllib.parse import urlsplit

EVERY_SECONDS = 0.02


def main(url: str) -> None:
    """Entry point."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    latencies: list[float] = []
    late: list[float] = []
    failed = 0
    while not stopped:
        due = time.monotonic() + EVERY_SECONDS
        time.sleep(EVERY_SECONDS)
        began = time.monotonic()
        late.append(began - due)
        try:
            connection.request("GET", parts.path)
            reply = connection.getresponse()
            reply.read()
            failed += reply.status != 200
        except (OSError, http.client.HTTPException):
            failed += 1
            connection.close()
        latencies.append(time.monotonic() - began)
    print(json.dumps({"latencies": latencies, "late": late, "failed": failed}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.bench.probe URL")
    main(sys.argv[1])
