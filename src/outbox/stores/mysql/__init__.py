"""MariaDB and MySQL: their store, and what is their own."""

from outbox.stores.mysql.store import MysqlStore

__all__ = ["MysqlStore"]
