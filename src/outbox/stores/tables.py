"""Tables: what the library keeps in a database, and every name in it, derived from one table name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Computed,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TextClause,
    Uuid,
    false,
    text,
)
from sqlalchemy.sql.visitors import iterate
from sqlalchemy.types import TypeEngine

from outbox.core.errors import ConfigurationError
from outbox.stores.texts import compared_as_text

TIMER_ONCE = "timer_once"  # where a column is computed so that a timer is unique while it waits
NOT_ROUTED = ""  # a destination that equals something can be searched in index order; IS NULL could not

# The rows of a queue live for milliseconds.
EARLY_VACUUM = "vacuum comes after a thousand dead rows, not after a fifth of the table"
STORAGE = {
    "autovacuum_vacuum_scale_factor": "0.02",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_insert_scale_factor": "0.2",
    "autovacuum_analyze_scale_factor": "0.1",
    "autovacuum_analyze_threshold": "1000",
    "autovacuum_vacuum_cost_delay": "0",
}
FREE_PAGES = "each page has free space, so that leases are written in place (HOT) and touch no index"
MESSAGES_STORAGE = {"fillfactor": "45", **STORAGE}
# SQLAlchemy has no option for them before 2.1, and what follows USING is written as it stands. An option of the table,
# and not a statement behind it, is what Alembic puts into migrations.


def _tuned(storage: Mapping[str, str], *reasons: str) -> str:
    """With the reasons as a comment, for readers of a migration."""
    settings = ", ".join(f"{name} = {value}" for name, value in storage.items())
    return f"heap WITH ({settings}) /* {', and '.join(reasons)} */"


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_TABLE = 40  # bytes; PostgreSQL cuts names at 63, and the longest derived one adds 20
LONGEST_SCHEMA = 63


Condition = ColumnElement[bool] | TextClause


class TableShapes:
    """What the tables are made of where databases differ. This is enough for one without partial indexes."""

    def id_type(self) -> TypeEngine[int]:
        """Of numbers that the database gives to rows."""
        return BigInteger().with_variant(Integer, "sqlite")

    def time_type(self) -> TypeEngine[datetime]:
        """Of times, to the microsecond."""
        return DateTime(timezone=True)

    def text_type(self, length: int | None = None) -> TypeEngine[str]:
        """Of texts, of so many characters at most."""
        return compared_as_text(Text() if length is None else String(length))

    def bytes_type(self) -> TypeEngine[bytes]:
        """Of bodies, which may have many megabytes."""
        return LargeBinary()

    def token_type(self) -> TypeEngine[UUID]:
        """Of the tokens of leases."""
        return Uuid()

    def index(self, table: Table, name: str, where: Condition, *columns: ColumnElement[Any]) -> None:
        """An index for rows of which a condition holds. It holds all others too, behind the column that tells them."""
        told = table.c[where.text] if isinstance(where, TextClause) else _column_of(where)
        Index(f"{table.name}_{name}", *([] if told in columns else [told]), *columns)

    def unique_while(self, table: Table, name: str, where: str, column: Column[Any]) -> None:
        """Let a value be there once among the rows of which a condition holds, and as often as it likes elsewhere.

        By a column that the database computes. It is NULL in all other rows, and NULL is no duplicate of NULL.
        """
        once = Column(
            f"{name}_once", column.type, Computed(f"CASE WHEN {where} THEN {column.name} END", persisted=True)
        )
        table.append_column(once)
        Index(f"{table.name}_{name}", once, unique=True)


class PartialIndexes(TableShapes):
    """For PostgreSQL and SQLite: indexes that hold no more rows than they are for."""

    def index(self, table: Table, name: str, where: Condition, *columns: ColumnElement[Any]) -> None:
        Index(f"{table.name}_{name}", *columns, postgresql_where=where, sqlite_where=where)

    def unique_while(self, table: Table, name: str, where: str, column: Column[Any]) -> None:
        # For PostgreSQL with its type, so that no operator of another role fits better than its own.
        typed, untyped = text(where.replace("destination", "destination::text")), text(where)
        Index(f"{table.name}_{name}", column, unique=True, postgresql_where=typed, sqlite_where=untyped)


def _column_of(condition: Condition) -> Column[Any]:
    """The column of which a condition tells whether it is NULL."""
    [found] = [element for element in iterate(condition) if isinstance(element, Column)]
    return found


PARTIAL_INDEXES = PartialIndexes()


@dataclass(frozen=True)
class Tables:
    """The seven tables of one outbox."""

    metadata: MetaData
    messages: Table
    dead_letters: Table
    bindings: Table
    inbox: Table
    state: Table
    circuits: Table
    owners: Table

    @classmethod
    def named(cls, table_name: str, schema: str | None = None, shapes: TableShapes = PARTIAL_INDEXES) -> Tables:
        """The tables of the outbox called `table_name`, as a database makes them."""
        check_identifier(table_name, "table_name", LONGEST_TABLE)
        if schema is not None:
            check_identifier(schema, "schema", LONGEST_SCHEMA)
        metadata = MetaData(schema=schema)
        return cls(
            metadata=metadata,
            messages=_messages(metadata, table_name, shapes),
            dead_letters=_dead_letters(metadata, table_name, shapes),
            bindings=Table(
                f"{table_name}_bindings",
                metadata,
                Column("queue", shapes.text_type(255), primary_key=True),
                Column("binding_key", shapes.text_type(255), primary_key=True),
            ),
            inbox=_inbox(metadata, table_name, shapes),
            state=Table(
                f"{table_name}_state",
                metadata,
                # Row 1 holds the transport and the version, row 2 the sleepers, so that neither waits for the other.
                Column("id", Integer, primary_key=True, autoincrement=False),
                Column("transport", shapes.text_type(64)),
                Column("bindings_version", BigInteger, nullable=False),
                Column("asleep_until", shapes.time_type()),  # a process waits for a wake-up until then
            ),
            circuits=Table(
                f"{table_name}_circuits",
                metadata,
                Column("destination", shapes.text_type(255), primary_key=True),
                Column("state", shapes.text_type(16), nullable=False),
                Column("failures", Integer, nullable=False),
                Column("paused_until", shapes.time_type()),  # while it is probed: the end of the probe's lease
                Column("error", shapes.text_type(), nullable=False),
                Column("refusing_since", shapes.time_type()),  # it answers, and takes nothing
            ),
            owners=Table(
                f"{table_name}_owners",
                metadata,
                Column("queue", shapes.text_type(255), primary_key=True),  # empty: the transport's row
                Column("owner", shapes.text_type(), nullable=False),  # a service; in the transport's row its address
            ),
        )

    def storage(self, table: Table) -> Mapping[str, str]:
        """The settings that PostgreSQL has for a table."""
        if table is self.messages:
            return MESSAGES_STORAGE
        return STORAGE if table in (self.dead_letters, self.inbox) else {}


def message_columns(shapes: TableShapes = PARTIAL_INDEXES) -> list[Column[object]]:
    """What a message and a dead letter both keep."""
    return [
        Column("created_at", shapes.time_type(), nullable=False),
        Column("expires_at", shapes.time_type()),
        Column("due_at", shapes.time_type(), nullable=False),
        Column("first_due_at", shapes.time_type()),  # what `due_at` was before it was put off
        Column("routed_at", shapes.time_type()),
        Column("attempts", Integer, nullable=False, server_default="0"),  # tries that ended
        Column("starts", Integer, nullable=False, server_default="0"),  # tries that began
        Column("destination", shapes.text_type(255), nullable=False, server_default=NOT_ROUTED),
        Column("routing_key", shapes.text_type(255), nullable=False),
        Column("key", shapes.text_type(255)),
        Column("message_id", shapes.text_type(255), nullable=False),
        Column("timer_id", shapes.text_type(255)),
        Column("content_type", shapes.text_type(255), nullable=False),
        Column("tracking_ids", shapes.text_type()),  # JSON, without the message's own id
        Column("headers", shapes.text_type()),  # JSON
        Column("history", shapes.text_type()),  # a line for each failed attempt
        Column("body", shapes.bytes_type(), nullable=False),
    ]


MESSAGE_COLUMNS = tuple(column.name for column in message_columns())


def _messages(metadata: MetaData, name: str, shapes: TableShapes) -> Table:
    table = Table(
        name,
        metadata,
        Column("id", shapes.id_type(), Identity(), primary_key=True),
        Column("done_at", shapes.time_type()),  # sent by a relay or handled by a worker, and kept
        Column("lease_until", shapes.time_type()),
        Column("lease_token", shapes.token_type()),
        Column("unroutable", Boolean, nullable=False, server_default=false()),
        *message_columns(shapes),
        sqlite_autoincrement=True,
        postgresql_using=_tuned(MESSAGES_STORAGE, FREE_PAGES, EARLY_VACUUM),
    )
    columns = table.c
    # No index holds what a lease changes, so that PostgreSQL writes leases in place (HOT).
    shapes.index(table, "claim", columns.done_at.is_(None), columns.destination, columns.due_at, columns.id)
    shapes.index(table, "done", columns.done_at.is_not(None), columns.done_at)
    shapes.index(table, "expiry", columns.expires_at.is_not(None), columns.expires_at)
    # As text, because Alembic writes a condition that is nothing but a column in a way that SQLAlchemy cannot read.
    shapes.index(table, "unroutable", text("unroutable"), columns.id)
    shapes.unique_while(
        table, "timer", "timer_id IS NOT NULL AND destination = '' AND done_at IS NULL", columns.timer_id
    )
    return table


def _dead_letters(metadata: MetaData, name: str, shapes: TableShapes) -> Table:
    table = Table(
        f"{name}_dead_letters",
        metadata,
        Column("id", shapes.id_type(), Identity(), primary_key=True),
        Column("died_at", shapes.time_type(), nullable=False),
        Column("reason", shapes.text_type(32), nullable=False),
        Column("error", shapes.text_type(), nullable=False),
        *message_columns(shapes),
        sqlite_autoincrement=True,
        postgresql_using=_tuned(STORAGE, EARLY_VACUUM),
    )
    Index(f"{table.name}_queue", table.c.destination, table.c.id)
    return table


def _inbox(metadata: MetaData, name: str, shapes: TableShapes) -> Table:
    table = Table(
        f"{name}_inbox",
        metadata,
        Column("queue", shapes.text_type(255), primary_key=True),
        Column("message_id", shapes.text_type(255), primary_key=True),
        Column("entered_at", shapes.time_type(), nullable=False),
        postgresql_using=_tuned(STORAGE, EARLY_VACUUM),
    )
    Index(f"{table.name}_entered", table.c.entered_at)
    return table


def check_identifier(name: str, what: str, longest: int) -> None:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise ConfigurationError(f"{what}={name!r}: letters, digits and underscores, not starting with a digit")
    if len(name) > longest:
        raise ConfigurationError(f"{what}={name!r}: at most {longest} characters, because other names derive from it")
