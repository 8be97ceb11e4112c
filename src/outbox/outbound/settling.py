"""Settling: writes what became of a claim's messages while others still wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from outbox.core.attempt import Attempt, Done, Outcome
from outbox.core.store import Claim
from outbox.core.transport import Published, Refusal

SETTLE_WITHIN = 0.1  # seconds that an answer waits for others before it is written

Judge = Callable[[Attempt, Refusal], Outcome | None]  # what a refusal means; none: it is given back at the end
Write = Callable[[Mapping[int, Outcome]], Awaitable[None]]

_DONE = Done()


class Settling:
    """The end of a claim, in as many parts as its answers come in. What has no answer stays under its lease."""

    def __init__(self, claim: Claim, took: Callable[[], None], judge: Judge, write: Write) -> None:
        self._took = took  # called when anything was confirmed
        self._judge = judge
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._waiting = {attempt.message.id: attempt for attempt in claim.attempts}
        self._copies: dict[str, list[Attempt]] = {}  # of messages that a claim holds more than once
        if len(self._waiting) < len(claim.attempts):
            self._find_copies(claim.attempts)
        self._spared: list[Attempt] = []  # answered, and given back all the same
        self._unwritten: dict[int, Outcome] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self.answered = False  # whether the destination said anything at all

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cut off, it writes the answers that it has; the claim gives the others back."""
        await self._no_more_parts()
        if kind is not None:
            with suppress(Exception):  # then their leases run out
                await self._write_unwritten()

    @property
    def waiting(self) -> list[str]:
        """The ids of messages without an answer."""
        return list(self._waiting)

    def report(self, published: Published) -> None:
        """Take answers, whenever they come."""
        self._take(published)
        self._write_soon()

    async def finish(self, rest: Outcome) -> None:
        """No more answers will come: write what is left, and how it goes on for messages that got none."""
        await self._no_more_parts()
        left = [each for id, attempt in self._waiting.items() for each in (attempt, *self._copies.get(id, ()))]
        self._unwritten.update((attempt.id, rest) for attempt in (*left, *self._spared))
        self._waiting.clear()
        self._spared.clear()
        await self._write_unwritten()

    def _take(self, published: Published) -> None:
        self.answered = self.answered or published.answered
        waiting, unwritten, left = self._waiting, self._unwritten, len(self._waiting)
        for id in published.confirmed:
            attempt = waiting.pop(id, None)
            if attempt is not None:
                unwritten[attempt.id] = _DONE
                if self._copies:
                    unwritten.update((copy.id, _DONE) for copy in self._copies.get(id, ()))
        if len(waiting) < left:
            self._took()
        for id, refusal in published.refused.items():
            attempt = waiting.pop(id, None)
            if attempt is not None:
                self._refuse((attempt, *self._copies.get(id, ())), refusal)

    def _refuse(self, attempts: Sequence[Attempt], refusal: Refusal) -> None:
        for attempt in attempts:
            outcome = self._judge(attempt, refusal)
            if outcome is None:
                self._spared.append(attempt)
            else:
                self._unwritten[attempt.id] = outcome

    def _find_copies(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if self._waiting[attempt.message.id] is not attempt:
                self._copies.setdefault(attempt.message.id, []).append(attempt)

    def _write_soon(self) -> None:
        if self._unwritten and self._timer is None and self._writing is None:
            self._timer = self._loop.call_later(SETTLE_WITHIN, self._begin_part)

    def _begin_part(self) -> None:
        self._timer = None
        self._writing = self._loop.create_task(self._write_part(), name="outbox settlement")

    async def _write_part(self) -> None:
        part = dict(self._unwritten)
        try:
            await self._write_unwritten()
        except Exception:  # noqa: BLE001 - it is tried again, at last at the end, and there an error counts
            self._unwritten = part | self._unwritten
        self._writing = None
        self._write_soon()

    async def _write_unwritten(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        if unwritten:
            await self._write(unwritten)

    async def _no_more_parts(self) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
