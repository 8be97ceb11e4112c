"""ServerWatch: lets go of a stream whose server is shutting down, because that waits for the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

STILL = 3.0  # seconds without a further position to confirm, after which the database is asked whether it answers
ASK_EVERY = 1.0  # seconds between two questions after one that had no answer
MOST_FAILURES = 3  # in a row
ANSWER_WITHIN = 5.0  # seconds


class ServerWatch:
    """A server that is told to stop ends all sessions but this stream, and waits until everything is confirmed.

    A relay confirms a position after it has deleted rows in another session, which the server does not take any more.
    Each would wait for the other. So the stream ends when the database has not answered several times.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask  # raises if the database does not answer
        self._loop = asyncio.get_running_loop()
        self._asking: asyncio.Task[None] | None = None
        self._ask_at = 0.0
        self._failures = 0
        self._confirmed = -1

    def look(self, confirmed: int, *, waits: bool) -> None:
        """Take note of the position that may be confirmed, and whether anything waits to be; raise if in vain."""
        now = self._loop.time()
        if confirmed > self._confirmed or not waits:
            self._confirmed, self._failures, self._ask_at = confirmed, 0, now + STILL
        elif self._failures >= MOST_FAILURES:
            raise ConnectionResetError("the database does not answer, and would wait for this stream if it shuts down")
        elif now >= self._ask_at and (self._asking is None or self._asking.done()):
            self._asking = self._loop.create_task(self._question(), name="outbox log watch")

    async def end(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _question(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await self._ask()
        except Exception:  # noqa: BLE001 - drivers throw what they like when their database is away
            self._failures += 1
            self._ask_at = self._loop.time() + ASK_EVERY
        else:
            self._failures = 0
            self._ask_at = self._loop.time() + STILL
