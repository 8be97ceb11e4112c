"""PostgreSQL: its store, and what is its own."""

from outbox.stores.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
