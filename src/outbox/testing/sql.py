"""Sql: the stores that tests can look into and move in time."""

from __future__ import annotations

from outbox.core.errors import ConfigurationError
from outbox.core.store import Store
from outbox.stores.sql import SqlStore


def sql_store(store: Store) -> SqlStore:
    """The store, if its messages are rows of tables."""
    if not isinstance(store, SqlStore):
        raise ConfigurationError(
            f"outbox.testing cannot look into a {type(store).__name__}: it knows stores that inherit SqlStore"
        )
    return store


async def may_write(store: Store) -> None:
    """TransactionError where this very task has a transaction open that our own writes would wait for in vain."""
    async with store.transactions.turn():
        pass
