"""SQLite: its store, and what is its own."""

from outbox.stores.sqlite.engines import in_memory, prepare
from outbox.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "in_memory", "prepare"]
