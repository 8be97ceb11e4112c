"""PostgresqlMaintenance: what has expired is not given up while a relay that reads the log may be sending it."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import ColumnElement, not_

from outbox.stores.maintenance import SqlMaintenance
from outbox.stores.tables import NOT_ROUTED

SENT_WITHIN = timedelta(minutes=1)  # what was claimed before it expired has an answer, or is in doubt


class PostgresqlMaintenance(SqlMaintenance):
    """A row that comes by the log has no lease. The slot's holder leaves it to the table when it has expired."""

    def _waits(self) -> ColumnElement[bool]:
        columns = self._messages.c
        by_log = (columns.destination == NOT_ROUTED) & columns.first_due_at.is_(None) & self._owners.has_feeds
        return super()._waits() & not_(by_log & (columns.expires_at > self._dialect.ago(SENT_WITHIN)))
