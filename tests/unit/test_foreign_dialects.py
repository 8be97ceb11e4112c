"""Engines of the application that have nothing to do with the outbox work as without it."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy import StaticPool, create_engine, text
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.exc import OperationalError

import outbox.stores.sqlite  # noqa: F401 - it listens to SQLite's dialects


class Connection:
    """What PEP 249 asks for, and nothing more."""

    def __init__(self) -> None:
        own = sqlite3.connect(":memory:")
        self.cursor, self.commit, self.rollback, self.close = own.cursor, own.commit, own.rollback, own.close


class Dialect(SQLiteDialect):
    """Made from SQLite's, as others are that lead to something else."""

    supports_statement_cache = True

    @classmethod
    def import_dbapi(cls) -> Any:
        return sqlite3

    def create_connect_args(self, url: Any) -> Any:
        return [], {}

    def connect(self, *arguments: Any, **options: Any) -> Any:
        return Connection()


def test_a_dialect_that_is_made_from_sqlites_is_left_alone() -> None:
    registry.register("sqlite.foreign", __name__, "Dialect")
    engine = create_engine("sqlite+foreign://", poolclass=StaticPool)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
        with pytest.raises(OperationalError):
            connection.execute(text("SELECT nothing FROM nowhere"))
    engine.dispose()
