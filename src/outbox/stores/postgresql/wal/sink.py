"""LogSink: what a stream fills, a transaction after the other, and whose window says what may be confirmed."""

from __future__ import annotations

import asyncio
from typing import Protocol

from outbox.stores.postgresql.wal.inserted_row import Microseconds
from outbox.stores.postgresql.wal.pgoutput import Insert
from outbox.stores.postgresql.wal.window import LoggedTransaction, LogWindow


class LogSink(Protocol):
    """Takes the inserts of the slot's holder."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when there is room again, and when something has ended."""
        ...

    @property
    def window(self) -> LogWindow:
        """Of the connection that has the slot."""
        ...

    @property
    def is_needed(self) -> bool:
        """Whether messages go nowhere without the log: what cannot be read of it ends the process then."""
        ...

    @property
    def has_room(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way that an earlier connection brought."""
        ...

    async def take_slot(self, system: str, timeline: int) -> None:
        """A new connection has the slot, on this server."""
        ...

    def insert(self, insert: Insert, transaction: LoggedTransaction) -> None:
        """Take a row, without waiting. The transaction counts it until it is settled."""
        ...

    def set_time(self, now: Microseconds) -> None:
        """What the server's clock says now."""
        ...

    def progress(self) -> None:
        """Time has passed, and perhaps a position was confirmed."""
        ...

    def stop(self) -> None:
        """Begin nothing more."""
        ...

    async def lose_slot(self) -> None:
        """The connection is gone. What was not confirmed comes again with the next one."""
        ...

    async def close(self) -> None:
        """Give up what has not ended."""
        ...
