"""Snapshots: which transactions of PostgreSQL see all along what their first statement saw."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.pool import Pool

KEEPING = ("REPEATABLE READ", "SERIALIZABLE")


class Snapshots:
    """Knows what transactions are like, where nothing else is said, for each pool of connections."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Pool, bool] = WeakKeyDictionary()

    def are_kept(self, connection: Connection) -> bool:
        """Asks the server once for each pool: its role, its database or its engine may say what is usual there."""
        level = connection.get_execution_options().get("isolation_level")
        if level is not None:
            return _keeps(level)
        pool = connection.engine.pool
        usual = self._usual.get(pool)
        if usual is None:
            usual = self._usual[pool] = _keeps(connection.get_isolation_level())
        return usual


def _keeps(level: str) -> bool:
    return level.upper().replace("_", " ") in KEEPING
