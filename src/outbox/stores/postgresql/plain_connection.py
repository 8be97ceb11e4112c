"""PlainLine: a connection beside a plain engine, for notifications where there is no async one. It blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.exc import DBAPIError

from outbox.stores.postgresql.spare import spare


class PlainLine:
    """One connection in AUTOCOMMIT, made when it is first needed and again when it was lost."""

    def __init__(self, engine: Engine, on: Callable[[Connection], Connection]) -> None:
        self._engine = spare(engine)
        self._on = on  # names the schema of the tables
        self._connection: Connection | None = None

    def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement that stands alone."""
        was_open = self._connection is not None
        try:
            return self._asked(statement, parameters)
        except DBAPIError as error:
            self.close()
            if not (was_open and error.connection_invalidated):
                raise
            return self._asked(statement, parameters)  # its server may have been started again meanwhile

    def _asked(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return self._on(self._connection).execute(statement, parameters).all()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        with suppress(Exception):  # it is lost
            if connection is not None:
                connection.close()
        self._engine.dispose()
