"""Tables: what the tormented application keeps beside the outbox, and a trigger that watches the outbox's leases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    MetaData,
    String,
    Table,
    Update,
    Uuid,
    update,
)
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

TABLE_NAME = "chaos"  # of the outbox

metadata = MetaData()
ORDERED, SHIPPED, CONFIRMED = "ordered", "shipped", "confirmed"  # books, with a balance for every account
_id = BigInteger().with_variant(Integer, "sqlite")
_moment = DateTime(timezone=True).with_variant(DATETIME(fsp=6), "mysql")


class clock(FunctionElement[Any]):  # noqa: N801 - reads as the function that it is
    """The database's own clock, at this very moment."""

    type = DateTime(timezone=True)
    inherit_cache = True


@compiles(clock, "postgresql")
def _postgresql(*_: object, **__: object) -> str:
    return "clock_timestamp()"


@compiles(clock, "sqlite")
def _sqlite(*_: object, **__: object) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


@compiles(clock, "mysql")
def _mysql(*_: object, **__: object) -> str:
    return "(SYSDATE(6))"


orders = Table(
    "orders",
    metadata,
    Column("number", String(64), primary_key=True),
    Column("messages", Integer, nullable=False),  # how many were emitted with it
)

balances = Table(
    "balances",
    metadata,
    Column("book", String(64), primary_key=True),
    Column("account", String(64), primary_key=True),
    Column("balance", BigInteger, nullable=False),
)

effects = Table(
    "effects",  # without a unique constraint, so that a second effect is seen
    metadata,
    Column("id", _id, primary_key=True, autoincrement=True),
    Column("message_id", String(255), nullable=False),
    Column("queue", String(64), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("digest", String(16), nullable=False),
    Column("at", _moment, nullable=False, server_default=clock()),
)

changes = Table(
    "changes",
    metadata,
    Column("id", _id, primary_key=True, autoincrement=True),
    Column("application", String(64)),
    Column("statement_at", _moment, nullable=False),
    Column("at", _moment, nullable=False, server_default=clock()),
    Column("deleted", Boolean, nullable=False),
    Column("row_id", BigInteger, nullable=False),
    Column("message_id", String(255), nullable=False),
    Column("queue", String(255), nullable=False),
    Column("old_token", Uuid),
    Column("old_until", _moment),
    Column("new_token", Uuid),
    Column("attempts", Integer, nullable=False),
)


def account(number: int) -> str:
    return f"account {number}"


def added(book: str, account: str, amount: int) -> Update:
    """Done twice, it is wrong: no balance says what it is made of."""
    this = (balances.c.book == book) & (balances.c.account == account)
    return update(balances).where(this).values(balance=balances.c.balance + amount)


_COLUMNS = "application, statement_at, deleted, row_id, message_id, queue, old_token, old_until, attempts, new_token"
_OLD = "OLD.id, OLD.message_id, OLD.destination, OLD.lease_token, OLD.lease_until, OLD.attempts"

_ON_SQLITE = "NULL, strftime('%Y-%m-%d %H:%M:%f000', 'now')"

_ON_MYSQL = "SUBSTRING_INDEX(USER(), '@', 1), NOW(6)"  # every process is a user of its own

TRIGGERS = {
    "postgresql": [
        f"""
        CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO changes ({_COLUMNS})
            VALUES (current_setting('application_name'), statement_timestamp(), TG_OP = 'DELETE', {_OLD},
                    CASE WHEN TG_OP = 'UPDATE' THEN NEW.lease_token END);
            RETURN NULL;
        END $$
        """,
        f"""
        CREATE TRIGGER note_change AFTER UPDATE OR DELETE ON {TABLE_NAME}
        FOR EACH ROW EXECUTE FUNCTION note_change()
        """,
    ],
    "mysql": [
        f"""
        CREATE TRIGGER note_update AFTER UPDATE ON {TABLE_NAME} FOR EACH ROW
            INSERT INTO changes ({_COLUMNS}) VALUES ({_ON_MYSQL}, 0, {_OLD}, NEW.lease_token)
        """,
        f"""
        CREATE TRIGGER note_delete AFTER DELETE ON {TABLE_NAME} FOR EACH ROW
            INSERT INTO changes ({_COLUMNS}) VALUES ({_ON_MYSQL}, 1, {_OLD}, NULL)
        """,
    ],
    "sqlite": [
        f"""
        CREATE TRIGGER note_update AFTER UPDATE ON {TABLE_NAME} BEGIN
            INSERT INTO changes ({_COLUMNS}) VALUES ({_ON_SQLITE}, 0, {_OLD}, NEW.lease_token);
        END
        """,
        f"""
        CREATE TRIGGER note_delete AFTER DELETE ON {TABLE_NAME} BEGIN
            INSERT INTO changes ({_COLUMNS}) VALUES ({_ON_SQLITE}, 1, {_OLD}, NULL);
        END
        """,
    ],
}
