"""Straight: many rows by their columns' positions, from the driver itself.

SQLAlchemy makes an object of each row, which costs more than to read it. Only asyncpg is spoken to like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.util import await_only

from outbox.core.prepared import dialect_for, prepare

DRIVER = "asyncpg"
DIALECT = dialect_for(f"postgresql.{DRIVER}", "numeric_dollar")


def fetched(connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    """The rows of a statement, on a connection whose statements commit by themselves."""
    if connection.dialect.driver != DRIVER:
        return connection.execute(statement, parameters).all()
    prepared = prepare(statement, tuple(parameters), DIALECT)
    raw: Any = connection.connection.driver_connection
    try:
        rows: Sequence[Sequence[Any]] = await_only(raw.fetch(prepared.text, *prepared.parameters(parameters)))
    except BaseException:
        connection.invalidate()  # nobody knows what the statement left behind, and SQLAlchemy has not seen it
        raise
    return rows
