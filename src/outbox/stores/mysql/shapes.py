"""MysqlShapes: the types of columns, and tables that only InnoDB may hold."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Dialect, String, Uuid
from sqlalchemy.dialects.mysql import DATETIME, LONGBLOB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeEngine

from outbox.stores.tables import Tables, TableShapes

DIALECTS = ("mysql", "mariadb")  # SQLAlchemy's names; the first one serves both servers
ENGINE = "InnoDB"


def collation(dialect: Any) -> str:
    """Compares byte by byte, spaces at the end included; each server has its own name for it."""
    return "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"


def exactly(dialect: Any) -> str:
    """What follows a type of text."""
    return f"CHARSET utf8mb4 COLLATE {collation(dialect)}"


class ExactText(String):
    """A text that equals no other one, of so many characters or of any number.

    The type names the collation, not the table: a server may have any for new tables.
    """

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)


@compiles(ExactText, "mysql")
@compiles(ExactText, "mariadb")
def _exact_text(type: ExactText, compiler: Any, **options: Any) -> str:
    kind = "LONGTEXT" if type.length is None else f"VARCHAR({type.length})"
    return f"{kind} {exactly(compiler.dialect)}"


class MysqlShapes(TableShapes):
    """Indexes hold all rows, and a column is computed for timers."""

    def id_type(self) -> TypeEngine[int]:
        return BigInteger()

    def time_type(self) -> TypeEngine[datetime]:
        return DATETIME(fsp=6)  # in UTC; a TIMESTAMP would be read in the session's time zone, and ends in 2038

    def text_type(self, length: int | None = None) -> TypeEngine[str]:
        return ExactText(length)

    def bytes_type(self) -> TypeEngine[bytes]:
        return LONGBLOB()

    def token_type(self) -> TypeEngine[UUID]:
        return Uuid(native_uuid=False)  # a column that both servers have


def in_innodb(tables: Tables) -> Tables:
    """The tables, to be made in the one engine that has transactions and locks rows."""
    for table in tables.metadata.sorted_tables:
        for dialect in DIALECTS:
            table.dialect_kwargs[f"{dialect}_engine"] = ENGINE
            table.dialect_kwargs[f"{dialect}_default_charset"] = "utf8mb4"
    return tables


def type_name(type: TypeEngine[Any], dialect: Dialect) -> str:
    return type.compile(dialect=dialect)
