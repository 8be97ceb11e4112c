"""MysqlInbox: many entries by one statement, while none of them is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Executable, String, insert, select
from sqlalchemy.exc import IntegrityError

from outbox.core.kept_property import kept_property
from outbox.core.store import Rows
from outbox.stores.inbox import COLUMNS, Entry, SqlInbox
from outbox.stores.mysql.statements import json_rows


class MysqlInbox(SqlInbox):
    """An INSERT of many rows that meets a known one is rolled back alone: then they are entered one by one."""

    def _enter(self, connection: Connection, queue: str, message_ids: Sequence[str], also: str | None) -> set[str]:
        ids = sorted(set(message_ids))
        rows = [{"queue": queue, "message_id": id} for id in ids]
        if also is None and len(ids) > 1 and self._all_are_new(connection, rows):
            return set(ids)
        return super()._enter(connection, queue, ids, also)

    def _enter_all(self, connection: Connection, entries: Sequence[Entry]) -> set[Entry]:
        known = sorted(set(entries))
        rows = [{"queue": queue, "message_id": id} for queue, id in known]
        if len(known) > 1 and self._all_are_new(connection, rows):
            return set(known)
        return super()._enter_all(connection, known)

    def _all_are_new(self, connection: Connection, rows: Rows) -> bool:
        try:
            connection.execute(self._together, {"rows": self._dialect.json(rows)})
        except IntegrityError as error:
            if error.orig is None or not self._dialect.is_already_there(error.orig):
                raise
            return False
        return True

    @kept_property
    def _together(self) -> Executable:
        named = json_rows("rows", {"queue": String, "message_id": String}).alias("named")
        source = select(named.c.queue, named.c.message_id, self._dialect.clock())
        entries: Any = insert(self._inbox).from_select(COLUMNS, source)
        return entries  # type: ignore[no-any-return]
