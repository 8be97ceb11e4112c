"""SQLite: what an application does for its own engine."""

from outbox.stores.sqlite import prepare

__all__ = ["prepare"]
