"""Loops: what belongs to one event loop, because it can be used in no other: connections, locks, tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    ending: AsyncGenerator[None, None]


class LoopLocal(Generic[Value]):
    """A value for each event loop: made when it is first needed there, closed there.

    `asyncio.run` and `asyncio.Runner` finalize a loop's asynchronous generators just before they close it, and a loop
    says nothing else about its end. So each value is closed by such a generator, unless `close` comes first. Values of
    loops that were closed without that are forgotten: nothing of theirs can be reached through a closed loop.
    """

    def __init__(self, make: Callable[[], Value], close: Callable[[Value], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._kept: dict[asyncio.AbstractEventLoop, _Kept[Value]] = {}

    def here(self) -> Value:
        """The running loop's value."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            for other in [other for other in list(self._kept) if other.is_closed()]:
                self._kept.pop(other, None)
            kept = self._kept[loop] = _Kept(self._make(), self._until_the_end(loop))
            first: Any = kept.ending.__anext__()
            with suppress(StopIteration):  # it has begun: nothing in it waits before its `yield`
                first.send(None)
        return kept.value

    def elsewhere(self) -> dict[asyncio.AbstractEventLoop, Value]:
        """The values of the other loops that are still open."""
        here = running_loop()
        return {
            loop: kept.value for loop, kept in list(self._kept.items()) if loop is not here and not loop.is_closed()
        }

    def __contains__(self, loop: asyncio.AbstractEventLoop) -> bool:
        return loop in self._kept

    async def close(self) -> None:
        """Close the running loop's value, if there is one. Until that is done it is still the loop's."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            return
        await self._close(kept.value)  # if this is cancelled, the next close finds it
        self._kept.pop(loop, None)
        await kept.ending.aclose()

    async def _until_the_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            kept = self._kept.get(loop)
            if kept is not None:
                await self._close(kept.value)
                self._kept.pop(loop, None)
