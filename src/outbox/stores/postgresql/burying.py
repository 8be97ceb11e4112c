"""PostgresqlBurying: one statement, so that whoever sees the row gone sees the dead letter."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, delete, insert, select

from outbox.stores.burying import KEPT, SAID, SqlBurying


class PostgresqlBurying(SqlBurying):
    """Deletes and copies at once."""

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        messages, dead_letters = self._tables.messages, self._tables.dead_letters
        chosen = statement.cte("chosen")
        gone = (
            delete(messages)
            .where(messages.c.id == chosen.c.id)
            .returning(messages.c.id, *(chosen.c[name] for name in SAID), *(messages.c[name] for name in KEPT))
            .cte("gone")
        )
        source = select(self._dialect.clock(), *(gone.c[name] for name in (*SAID, *KEPT)))
        buried = insert(dead_letters).from_select(["died_at", *SAID, *KEPT], source).cte("buried")
        return list(connection.execute(select(gone.c.id).add_cte(buried), parameters).scalars())
