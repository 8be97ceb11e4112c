"""Tables: what the library keeps in a database, and every name in it, derived from one table name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
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
from sqlalchemy.types import TypeEngine

from outbox.core.errors import ConfigurationError
from outbox.stores.texts import compared_as_text

NOT_ROUTED = ""  # a destination that equals something can be searched in index order; IS NULL could not

# The rows of a queue live for milliseconds: vacuum must come by the thousand rows, not by the fifth of a table.
STORAGE = {
    "autovacuum_vacuum_scale_factor": "0.02",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_insert_scale_factor": "0.2",
    "autovacuum_analyze_scale_factor": "0.1",
    "autovacuum_analyze_threshold": "1000",
    "autovacuum_vacuum_cost_delay": "0",
}
# A page that is left more than half empty has room for the leases on its messages, written without touching an index.
MESSAGES_STORAGE = {"fillfactor": "45", **STORAGE}
# SQLAlchemy has no option for them before 2.1, and what follows USING is written as it stands. An option of the table,
# and not a statement behind it, is what Alembic puts into migrations.


def _tuned(storage: Mapping[str, str]) -> str:
    return f"heap WITH ({', '.join(f'{name} = {value}' for name, value in storage.items())})"


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_TABLE = 40  # bytes; PostgreSQL cuts names at 63, and the longest derived one adds 20
LONGEST_SCHEMA = 63


def _text(length: int | None = None) -> TypeEngine[str]:
    return compared_as_text(Text() if length is None else String(length))


_id = BigInteger().with_variant(Integer, "sqlite")


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
    def named(cls, table_name: str, schema: str | None = None) -> Tables:
        """The tables of the outbox called `table_name`."""
        check_identifier(table_name, "table_name", LONGEST_TABLE)
        if schema is not None:
            check_identifier(schema, "schema", LONGEST_SCHEMA)
        metadata = MetaData(schema=schema)
        return cls(
            metadata=metadata,
            messages=_messages(metadata, table_name),
            dead_letters=_dead_letters(metadata, table_name),
            bindings=Table(
                f"{table_name}_bindings",
                metadata,
                Column("queue", _text(255), primary_key=True),
                Column("binding_key", _text(255), primary_key=True),
            ),
            inbox=_inbox(metadata, table_name),
            state=Table(
                f"{table_name}_state",
                metadata,
                # Row 1 holds the transport and the version, row 2 the sleepers, so that nobody waits for the other.
                Column("id", Integer, primary_key=True, autoincrement=False),
                Column("transport", _text(64)),
                Column("bindings_version", BigInteger, nullable=False),
                Column("asleep_until", DateTime(timezone=True)),  # somebody waits for a wake-up until then
            ),
            circuits=Table(
                f"{table_name}_circuits",
                metadata,
                Column("destination", _text(255), primary_key=True),
                Column("state", _text(16), nullable=False),
                Column("failures", Integer, nullable=False),
                Column("paused_until", DateTime(timezone=True)),  # while it is probed: the end of the probe's lease
                Column("error", _text(), nullable=False),
                Column("refusing_since", DateTime(timezone=True)),  # it answers, and takes nothing
            ),
            owners=Table(
                f"{table_name}_owners",
                metadata,
                Column("queue", _text(255), primary_key=True),  # empty: the transport's row
                Column("owner", _text(), nullable=False),  # a service; in the transport's row its address
            ),
        )

    def storage(self, table: Table) -> Mapping[str, str]:
        """The settings that PostgreSQL has for a table."""
        if table is self.messages:
            return MESSAGES_STORAGE
        return STORAGE if table in (self.dead_letters, self.inbox) else {}


def message_columns() -> list[Column[object]]:
    """What a message and a dead letter both keep."""
    return [
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("expires_at", DateTime(timezone=True)),
        Column("due_at", DateTime(timezone=True), nullable=False),
        Column("first_due_at", DateTime(timezone=True)),  # what `due_at` was before it was put off
        Column("routed_at", DateTime(timezone=True)),
        Column("attempts", Integer, nullable=False, server_default="0"),  # tries that ended
        Column("starts", Integer, nullable=False, server_default="0"),  # tries that began
        Column("destination", _text(255), nullable=False, server_default=NOT_ROUTED),
        Column("routing_key", _text(255), nullable=False),
        Column("key", _text(255)),
        Column("message_id", _text(255), nullable=False),
        Column("timer_id", _text(255)),
        Column("content_type", _text(255), nullable=False),
        Column("tracking_ids", _text()),  # JSON, without the message's own id
        Column("headers", _text()),  # JSON
        Column("history", _text()),  # a line for each failed attempt
        Column("body", LargeBinary, nullable=False),
    ]


MESSAGE_COLUMNS = tuple(column.name for column in message_columns())


def _messages(metadata: MetaData, name: str) -> Table:
    table = Table(
        name,
        metadata,
        Column("id", _id, Identity(), primary_key=True),
        Column("done_at", DateTime(timezone=True)),  # sent by a relay or handled by a worker, and kept
        Column("lease_until", DateTime(timezone=True)),
        Column("lease_token", Uuid),
        Column("unroutable", Boolean, nullable=False, server_default=false()),
        *message_columns(),
        sqlite_autoincrement=True,
        postgresql_using=_tuned(MESSAGES_STORAGE),
    )
    columns = table.c
    # No index holds what a lease changes, so that PostgreSQL writes leases in place (HOT).
    _index("claim", table, columns.done_at.is_(None), columns.destination, columns.due_at, columns.id)
    _index("done", table, columns.done_at.is_not(None), columns.done_at)
    _index("expiry", table, columns.expires_at.is_not(None), columns.expires_at)
    # As text, because Alembic writes a condition that is nothing but a column in a way that SQLAlchemy cannot read.
    _index("unroutable", table, text("unroutable"), columns.id)
    waits = "timer_id IS NOT NULL AND {} = '' AND done_at IS NULL"
    # For PostgreSQL with its type, so that no operator of another role fits better than its own.
    typed, untyped = text(waits.format("destination::text")), text(waits.format("destination"))
    _index("timer", table, untyped, columns.timer_id, unique=True, on_postgresql=typed)
    return table


def _dead_letters(metadata: MetaData, name: str) -> Table:
    table = Table(
        f"{name}_dead_letters",
        metadata,
        Column("id", _id, Identity(), primary_key=True),
        Column("died_at", DateTime(timezone=True), nullable=False),
        Column("reason", _text(32), nullable=False),
        Column("error", _text(), nullable=False),
        *message_columns(),
        sqlite_autoincrement=True,
        postgresql_using=_tuned(STORAGE),
    )
    Index(f"{table.name}_queue", table.c.destination, table.c.id)
    return table


def _inbox(metadata: MetaData, name: str) -> Table:
    table = Table(
        f"{name}_inbox",
        metadata,
        Column("queue", _text(255), primary_key=True),
        Column("message_id", _text(255), primary_key=True),
        Column("entered_at", DateTime(timezone=True), nullable=False),
        postgresql_using=_tuned(STORAGE),
    )
    Index(f"{table.name}_entered", table.c.entered_at)
    return table


def _index(
    name: str,
    table: Table,
    where: ColumnElement[bool] | TextClause,
    *columns: ColumnElement[object],
    unique: bool = False,
    on_postgresql: TextClause | None = None,
) -> None:
    typed = where if on_postgresql is None else on_postgresql
    Index(f"{table.name}_{name}", *columns, unique=unique, postgresql_where=typed, sqlite_where=where)


def check_identifier(name: str, what: str, longest: int) -> None:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise ConfigurationError(f"{what}={name!r}: letters, digits and underscores, not starting with a digit")
    if len(name) > longest:
        raise ConfigurationError(f"{what}={name!r}: at most {longest} characters, because other names derive from it")
