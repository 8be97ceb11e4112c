"""SqlTransactions: what is known of a transaction on a caller's connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from sqlalchemy import Connection

from outbox.core.errors import TransactionError, causes
from outbox.core.transaction_state import ENDED_ON_DRIVER, TransactionState, watched_driver
from outbox.stores.dialect import SqlDialect
from outbox.stores.failures import failure_in, nothing_is_kept
from outbox.stores.runner import Runner


class SqlTransactions:
    """Answers from what SQLAlchemy and the driver know; a round trip only where there is doubt."""

    def __init__(self, dialect: SqlDialect, runner: Runner) -> None:
        self._dialect = dialect
        self._runner = runner

    @property
    def writes_side_by_side(self) -> bool:
        return self._runner.writes_side_by_side

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        return self._runner.turn(for_caller=for_caller)

    def is_conflict(self, error: BaseException) -> bool:
        return any(map(self._dialect.is_own_conflict, causes(error)))

    def keeps_snapshot(self, connection: Connection) -> bool:
        return self._dialect.keeps_snapshot(connection)

    def state_of(self, connection: Connection) -> TransactionState:
        if connection.closed or connection.invalidated:
            return TransactionState.UNKNOWN
        level = connection.get_execution_options().get("isolation_level")
        if level is None:
            level = getattr(connection.dialect, "_on_connect_isolation_level", None)
        return TransactionState.AUTOCOMMIT if level == "AUTOCOMMIT" else self._dialect.driver_state_of(connection)

    def query_counter(self, connection: Connection) -> Callable[[], int] | None:
        return self._dialect.query_counter(connection)

    def aborted(self, connection: Connection, *, in_doubt: bool = False) -> TransactionError | None:
        if connection.closed or connection.invalidated:
            return None
        driver = watched_driver(connection)
        if driver is not None:
            if driver.has_ended():
                return TransactionError(ENDED_ON_DRIVER)
            in_doubt = in_doubt or driver.was_used()
        in_doubt = in_doubt or failure_in(connection) is not None
        return nothing_is_kept(connection) if self._dialect.is_aborted(connection, in_doubt=in_doubt) else None

    def isolation(self, level: str) -> Mapping[str, Any]:
        return self._dialect.isolation(level)
