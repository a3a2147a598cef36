"""Keeps a waiting stream's connection alive: load balancers cut one on which nothing comes for long."""

import asyncio
import contextlib
from collections.abc import Callable

from serving.gateway.client_side import COMMENT, ClientLeftError, ClientSide
from serving.spec import Timeouts


class Comments:
    """One stream's head after the holding time, then comments until content comes."""

    __slots__ = ("_client", "_ended", "_headers", "_left", "_task", "_timeouts", "_timer")

    def __init__(
        self,
        client: ClientSide,
        timeouts: Timeouts,
        headers: Callable[[], list[tuple[bytes, bytes]]],
        left: Callable[[], None],
    ) -> None:
        """`headers` makes the stream's head; `left` is called if the client turns out to be gone."""
        self._client = client
        self._timeouts = timeouts
        self._headers = headers
        self._left = left
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    def start_in(self, seconds: float) -> None:
        """They start then, if nothing has ended them; asked again, it does nothing."""
        if self._timer is None and self._task is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._start)

    async def end(self) -> None:
        """No comment is on its way after this. One that is being written is not cut off: its half would be in the
        stream."""
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    def cancel(self) -> None:
        """The request is over: whatever is under way is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if not self._ended.is_set() and not self._client.started:
            self._task = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        try:
            await self._client.start(200, self._headers())
            while not self._ended.is_set():
                await self._client.write(COMMENT)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timeouts.comment_every):
                        await self._ended.wait()
        except ClientLeftError:
            self._left()
