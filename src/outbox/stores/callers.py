"""CallerConnections: a caller's own connection, for statements on our tables in the caller's transaction."""

from __future__ import annotations

from sqlalchemy import Connection, Executable

from outbox.core.store import Rows


class CallerConnections:
    """Executes on a caller's connection, never commits there, and leaves it as the database leaves it."""

    def on(self, connection: Connection) -> Connection:
        """A caller's connection, for statements on our own tables whatever the caller set it to."""
        return connection

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        """Execute a statement; how many rows it wrote."""
        return execute(self.on(connection), statement, rows)


def execute(connection: Connection, statement: Executable, rows: Rows | None) -> int:
    """One row goes as a plain statement, several as one batch."""
    return connection.execute(statement, rows[0] if rows and len(rows) == 1 else rows).rowcount
