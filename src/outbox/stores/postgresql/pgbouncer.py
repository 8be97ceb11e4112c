"""Pooling: what a connection pooler such as PgBouncer asks of a driver when any transaction may run on any connection.

Nothing of ours outlives a transaction: no session's lock, no SET, no temporary table. What is left are prepared
statements, which drivers keep to be quicker: the next transaction may meet a server that does not know them or, worse,
that knows another one by the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL

from outbox.core.errors import ConfigurationError

# For each driver the connect_args without which it keeps prepared statements.
UNPREPARED: Mapping[str, Mapping[str, Any]] = {
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
    "psycopg": {"prepare_threshold": None},
}

_MIXED_UP = {
    "42P05",  # this prepared statement exists already: another client made it
    "26000",  # there is no such prepared statement: it was made on another connection
    "08P01",  # it takes other parameters: it is another client's statement of the same name
}


def unprepared(url: URL) -> dict[str, Any]:
    """The connect_args for an engine of our own, unless its URL has settings of that kind."""
    settings = UNPREPARED.get(url.get_driver_name(), {})
    return {} if settings.keys() & url.query.keys() else dict(settings)


@contextmanager
def explained(driver: str) -> Iterator[None]:
    """Turn the errors of mixed up prepared statements into one that says what to do."""
    try:
        yield
    except Exception as error:
        if driver in UNPREPARED and _mixed_up(error):
            raise ConfigurationError(
                "prepared statements got mixed up: a pooler such as PgBouncer runs each transaction on any of its "
                f"connections. Make your engine with connect_args={dict(UNPREPARED[driver])!r}"
            ) from error
        raise


def _mixed_up(error: Exception) -> bool:
    # An error while a connection is made is the driver's own, not wrapped by SQLAlchemy.
    original = getattr(error, "orig", None) or error
    return getattr(original, "sqlstate", None) in _MIXED_UP and "prepared statement" in str(original)
