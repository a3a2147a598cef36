"""The processes of a bench: started on a stated core, awaited, measured, and ended by their own id."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import psutil


class BenchProcessError(RuntimeError):
    """A process ended, or was not ready in time. Carries the end of what it wrote."""


class BenchProcess:
    """One started process and its children."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self._popen = popen
        self._log = log
        self._family = psutil.Process(popen.pid)

    def cpu_seconds(self) -> float:
        """User and system time of the process and its living children."""
        return sum(sum(member.cpu_times()[:2]) for member in self._members())

    def rss_bytes(self) -> int:
        """Resident memory of the process and its living children."""
        return sum(int(member.memory_info().rss) for member in self._members())

    def ended(self) -> bool:
        """It is no longer running."""
        return self._popen.poll() is not None

    def output(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.output().splitlines()[-lines:])

    def stop(self, grace: float = 5.0) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds, for it and its children."""
        members = self._members()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(members, timeout=grace)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self._popen.wait()

    def _members(self) -> list[psutil.Process]:
        try:
            return [self._family, *self._family.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], core: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[BenchProcess]:
    """Runs the command on one core, its output in a file of `folder`, and ends it on the way out."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    process = BenchProcess(name, popen, log)
    try:
        yield process
    finally:
        process.stop()


async def ready(process: BenchProcess, url: str, seconds: float) -> None:
    """Waits until the URL answers 200.

    Raises:
        BenchProcessError: the process ended, or `seconds` passed.
    """
    until = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while time.monotonic() < until:
            if process.ended():
                raise BenchProcessError(f"{process.name} ended before it was ready:\n{process.log_tail()}")
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.1)
    raise BenchProcessError(f"{process.name} did not answer at {url} within {seconds:g} s:\n{process.log_tail()}")


def cores() -> tuple[int, int]:
    """(the core of client and engine, the core of what is measured).

    Raises:
        BenchProcessError: fewer than two cores may be used.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise BenchProcessError(f"the bench needs two cores, this process may use {usable}")
    return usable[0], usable[1]
