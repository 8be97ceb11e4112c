"""MysqlSelecting: a claim that reads what it finds while it locks it, for servers whose UPDATE returns nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Select, bindparam, case, false, null

from outbox.core.kept_property import kept_property
from outbox.core.store import Selection
from outbox.stores.leases import one_more
from outbox.stores.rows import CLAIMED, LARGEST, ClaimedRow
from outbox.stores.selecting import AIM, SqlSelecting, Tokens, due_parameters, lease_parameters


class MysqlSelecting(SqlSelecting):
    """By the index in whose order messages are claimed: by any other one, each row that is read would be locked."""

    @kept_property
    def due(self) -> Select[Any]:
        return self._due().with_hint(self._messages, f"FORCE INDEX ({self._messages.name}_claim)")

    def take(self, connection: Connection, selection: Selection, tokens: Tokens) -> Sequence[ClaimedRow]:
        """Lease due messages. Only where some are suspected or large they are read again, after they were leased."""
        largest = AIM if selection.largest_bytes is None else selection.largest_bytes
        fair = {"fair": largest // max(1, selection.limit)}
        found: Any = connection.execute(self._whole, {**due_parameters(selection), **fair}).all()
        ids = self._chosen(found, selection)
        if not ids:
            return []
        terms, chosen = lease_parameters(selection, tokens), set(ids)
        rows = [row for row in found if row.id in chosen]
        if any(row.suspected or row.size > fair["fair"] for row in rows):
            return self._take(connection, ids, terms)
        connection.execute(self._lease, {**terms, "ids": self._dialect.listed(ids)})
        return rows

    @kept_property
    def _whole(self) -> Select[Any]:
        """Due messages with all that is told of them. Together they have no more bytes than a claim may fetch."""
        told = {column.key: column for column in self._told(false())}
        told["starts"] = one_more(self._messages.c.starts).label("starts")
        fits = self._row_size <= bindparam("fair", type_=Integer)
        for name in LARGEST:
            told[name] = case((fits, told[name].element), else_=null()).label(name)
        suspected, size = self.due.selected_columns["suspected"], self.due.selected_columns["size"]
        columns: list[ColumnElement[Any]] = [*(told[name] for name in CLAIMED), suspected, size]
        return self.due.with_only_columns(*columns, maintain_column_froms=True)
