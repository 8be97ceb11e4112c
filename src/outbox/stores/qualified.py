"""Qualified: a caller's connection on which our statements name their schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import Connection, CursorResult, Executable

Schemas = Mapping[str | None, str | None]  # what a table's schema is called in statements


class _Qualified:
    """For `execute` alone. A map of the caller's own does not count there."""

    def __init__(self, connection: Connection, schemas: Schemas) -> None:
        self._connection = connection
        self._options = naming(schemas)

    def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters, execution_options=self._options)


def qualified(connection: Connection, schemas: Schemas) -> Connection:
    """The connection, for executing statements on our own tables."""
    return cast(Connection, _Qualified(connection, schemas))


def naming(schemas: Schemas) -> dict[str, Any]:
    """The option for a connection, or for one execution, with which tables are looked for in these schemas."""
    return {"schema_translate_map": schemas}
