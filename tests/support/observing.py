"""Observing: what tests wait for, instead of waiting for a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, overload

from sqlalchemy import Engine, event, update

from outbox import Outbox

Value = TypeVar("Value")

PATIENCE = 60.0  # seconds after which something that should have happened has not, on the slowest machine


@overload
async def eventually(look: Callable[[], Awaitable[Value | None]]) -> Value: ...
@overload
async def eventually(look: Callable[[], Value | None]) -> Value: ...
async def eventually(look: Callable[[], Any]) -> Any:
    """The first thing a look finds that is true."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = look()
            value = await found if inspect.isawaitable(found) else found
            if value:
                return value
            await asyncio.sleep(0.005)


async def arrival(arrivals: asyncio.Queue[Value]) -> Value:
    """What a listener puts into a queue next."""
    return await asyncio.wait_for(arrivals.get(), PATIENCE)


class Recorder:
    """An observer that remembers every event."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type[Value]) -> list[Value]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(self, kind: type[Value], count: int = 1) -> list[Value]:
        """The events of a kind, as soon as there are enough of them."""
        return await eventually(lambda: found if len(found := self.of(kind)) >= count else [])


class Statements:
    """The statements that reach any database while this is open, in their order."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._target = Engine if engine is None else engine
        self.texts: list[str] = []

    def __enter__(self) -> list[str]:
        event.listen(self._target, "before_cursor_execute", self._note)
        return self.texts

    def __exit__(self, *error: object) -> None:
        event.remove(self._target, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, statement: str, *further: Any) -> None:
        self.texts.append(statement)


async def routing_keys(outbox: Outbox) -> list[str]:
    """What lies in the outbox table, in the order of its rows."""
    return [stored.message.routing_key for stored in await outbox.messages()]


async def let_leases_run_out(outbox: Outbox) -> None:
    """Make the database believe that whoever holds a message has given no sign of life for a long time."""
    messages = outbox.tables.messages
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    async with outbox.transaction() as session:
        await session.execute(update(messages).where(messages.c.lease_until.is_not(None)).values(lease_until=long_ago))
