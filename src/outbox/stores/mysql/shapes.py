"""MysqlShapes: the types of columns, and tables that only InnoDB may hold."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Dialect, String, Uuid
from sqlalchemy.dialects.mysql import DATETIME, LONGBLOB, LONGTEXT
from sqlalchemy.types import TypeEngine

from outbox.stores.tables import Tables, TableShapes

DIALECTS = ("mysql", "mariadb")  # SQLAlchemy's names; the first one serves both servers
ENGINE = "InnoDB"


# Compared byte by byte, spaces at the end included. Each server reads the comment that is meant for it: MariaDB passes
# over those for MySQL 5.7 and later. So a script or a migration is the same for both.
COLLATION = "/*!80017 utf8mb4_0900_bin */ /*M!100600 utf8mb4_nopad_bin */"


def collation(dialect: Any) -> str:
    """The name that a server has for it."""
    return "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"


def exactly(dialect: Any) -> str:
    """What follows a type of text where no table says it."""
    return f"CHARSET utf8mb4 COLLATE {collation(dialect)}"


class MysqlShapes(TableShapes):
    """Indexes hold all rows, and a column is computed for timers."""

    def id_type(self) -> TypeEngine[int]:
        return BigInteger()

    def time_type(self) -> TypeEngine[datetime]:
        return DATETIME(fsp=6)  # in UTC; a TIMESTAMP would be read in the session's time zone, and ends in 2038

    def text_type(self, length: int | None = None) -> TypeEngine[str]:
        return LONGTEXT() if length is None else String(length)  # the table has the collation

    def bytes_type(self) -> TypeEngine[bytes]:
        return LONGBLOB()

    def token_type(self) -> TypeEngine[UUID]:
        return Uuid(native_uuid=False)  # a column that both servers have


def in_innodb(tables: Tables) -> Tables:
    """The tables, to be made in the one engine that has transactions and locks rows.

    The collation is an option of the table, and no type of ours: a migration of Alembic imports nothing of ours.
    """
    for table in tables.metadata.sorted_tables:
        for dialect in DIALECTS:
            table.dialect_kwargs[f"{dialect}_engine"] = ENGINE
            table.dialect_kwargs[f"{dialect}_default_charset"] = "utf8mb4"
            table.dialect_kwargs[f"{dialect}_collate"] = COLLATION
    return tables


def type_name(type: TypeEngine[Any], dialect: Dialect) -> str:
    return type.compile(dialect=dialect)
