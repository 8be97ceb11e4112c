"""What a doctor asks MariaDB and MySQL."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, text

from outbox.core.diagnosis import Finding, Level
from outbox.stores.tables import Tables

_NEXT_ID = text(
    """
    SELECT AUTO_INCREMENT FROM information_schema.TABLES
    WHERE TABLE_NAME = :name AND TABLE_SCHEMA = COALESCE(:schema, DATABASE())
    """
)


def server(connection: Connection) -> str:
    version = str(connection.scalar(text("SELECT VERSION()")))
    return f"MariaDB {version.partition('-')[0]}" if "mariadb" in version.lower() else f"MySQL {version}"


def rows_written(connection: Connection, tables: Tables) -> int:
    """Numbers of rows are drawn in blocks by statements that copy, so that it may be somewhat less."""
    here = {"name": tables.messages.name, "schema": tables.messages.schema}
    return int(connection.scalar(_NEXT_ID, here) or 1) - 1


def findings(connection: Connection, tables: Tables) -> Iterator[Finding]:
    """What may slow the tables down, or refuse messages."""
    yield Finding(Level.OK, "server", server(connection))
