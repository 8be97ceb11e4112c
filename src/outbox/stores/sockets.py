"""Sockets: those of our own connections, which a forked child must not speak over.

Two processes on one socket mix up their transactions. In a child each of them leads nowhere from the beginning, also
for a session that was open when the process forked: its next statement fails instead of reaching the parent's
transaction. The server sees the end of the connection when the parent ends it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine, Pool, event

from outbox.core.forks import forget_after_fork, lead_nowhere


class _Connections:
    """All connections of our own in this process."""

    def __init__(self) -> None:
        self._records: WeakSet[Any] = WeakSet()

    def add(self, connection: Any, record: Any) -> None:
        self._records.add(record)

    def forked(self) -> None:
        for record in list(self._records):
            with suppress(Exception):  # it is closed
                lead_nowhere(descriptor(record.driver_connection))


_connections = _Connections()
forget_after_fork(_connections)


def cut_in_children(connecting: Engine | Pool) -> None:
    """Let connections of our own lead nowhere in forked children."""
    event.listen(connecting, "connect", _connections.add)


def descriptor(driver_connection: Any) -> int:
    """The number of a connection's socket. asyncpg's can be had from its transport only."""
    if hasattr(driver_connection, "fileno"):
        number: int = driver_connection.fileno()
    else:
        number = driver_connection._transport.get_extra_info("socket").fileno()
    return number
