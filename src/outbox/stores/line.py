"""Line: a connection that leads straight to the server, kept for the statements that a message waits for.

A pool and SQLAlchemy's execution take as long as such a statement itself. Here it stays prepared, which a pooler in
between would mix up, and is asked through the driver, asyncpg.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Executable

from outbox.core.prepared import dialect_for, prepare

DRIVER = "asyncpg"

_DIALECT = dialect_for(f"postgresql.{DRIVER}", "numeric_dollar")


class Line:
    """One of asyncpg's connections, on which every statement commits by itself."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._statements: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    @property
    def is_closed(self) -> bool:
        closed: bool = self._raw.is_closed()
        return closed

    @property
    def is_free(self) -> bool:
        return not self._turn.locked() and not self.is_closed

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement. A failure ends the line: nobody knows what it left behind."""
        prepared = prepare(statement, tuple(parameters), _DIALECT)
        async with self._turn:
            try:
                known = self._statements.get(prepared.text)
                if known is None:
                    known = self._statements[prepared.text] = await self._raw.prepare(prepared.text)
                rows: Sequence[Sequence[Any]] = await known.fetch(*prepared.parameters(parameters))
            except BaseException:
                self._raw.terminate()
                raise
        return rows

    async def check(self) -> None:
        """Find out whether it still leads anywhere."""
        async with self._turn:
            await self._raw.execute("SELECT 1")
