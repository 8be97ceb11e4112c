"""Leases: the conditions and the arithmetic that statements on leased rows share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, Update, bindparam, case

from outbox.stores.dialect import SqlDialect
from outbox.stores.rows import LONGEST_HISTORY

HIGHEST = 2**31 - 1  # that a column holds


def unleased(messages: Table, moment: ColumnElement[Any]) -> ColumnElement[bool]:
    """It has no lease, or its lease has expired."""
    until = messages.c.lease_until
    return until.is_(None) | (until <= moment)


def held(messages: Table, dialect: SqlDialect, name: str = "token") -> ColumnElement[bool]:
    """The fence: the lease is still the one bound under this name, by the database's clock at this very moment."""
    columns = messages.c
    return (columns.lease_token == bindparam(name, type_=columns.lease_token.type)) & (
        columns.lease_until > dialect.clock()
    )


def set_in_order(statement: Update, **values: Any) -> Update:
    """An UPDATE whose assignments keep this order: some databases read in a later one what an earlier one has set."""
    return statement.ordered_values(*values.items())


def one_more(count: ColumnElement[int]) -> ColumnElement[int]:
    """A count and one. A row of another program may hold the highest there is, and must not fail a whole batch."""
    return case((count < HIGHEST, count + 1), else_=count)


def one_less(count: ColumnElement[int]) -> ColumnElement[int]:
    return case((count > -HIGHEST, count - 1), else_=count)


def with_line(dialect: SqlDialect, history: ColumnElement[str], line: ColumnElement[str]) -> ColumnElement[str]:
    """A history with a further line, its beginning forgotten when it grows too long."""
    return dialect.ending(case((history.is_(None), line), else_=history + line), LONGEST_HISTORY)
