"""Reaching: whether an error means that a database is away, or that it answers and refuses."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError, TimeoutError

from outbox.core.errors import DatabaseSilent

REFUSED = "42501"  # the SQL state of a right that is missing
_AWAY = ("08", "28", "3D", "53", "57")  # SQL states: connection, password, database, resources, operator
_BROKEN = ("InterfaceError", "InternalClientError")  # a driver's own, of a connection that is closed or was cut


def is_unreachable(error: BaseException) -> bool:
    """Whether the database is away, or takes no connections."""
    state = sql_state(error)
    if state:
        return state[:2] in _AWAY
    if isinstance(error, OSError | DatabaseSilent | TimeoutError):
        return True
    # Neither psycopg nor sqlite3 gives a state when no connection came about. What a server refuses has one.
    if isinstance(error, DBAPIError):
        return not str(original(error)).startswith("no such")
    return type(error).__name__ in _BROKEN


def sql_state(error: BaseException) -> str:
    return getattr(original(error), "sqlstate", None) or ""


def original(error: BaseException) -> Any:
    """SQLAlchemy's own text goes on with the statement and a link: the driver's is what happened."""
    return getattr(error, "orig", None) or error
