"""MariaDB: the server of a test, or a MySQL in its place, and what a test says to it over a connection of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import unquote, urlsplit

from outbox.testing.servers import MariaDB, MySQL, Server, mariadb, mysql

ON_MYSQL = "OUTBOX_TEST_ON_MYSQL"  # 1: what runs on MariaDB runs on a MySQL


def on_mysql() -> bool:
    return os.environ.get(ON_MYSQL) == "1"


def private_server(settings: Mapping[str, str] | None = None) -> MariaDB | MySQL:
    """A server of one test's own."""
    return (MySQL if on_mysql() else MariaDB)(settings=settings)


def shared_server() -> AbstractContextManager[Server]:
    """The server of a run, by the ladder."""
    return mysql() if on_mysql() else mariadb()


def url_through(url: str, driver: str) -> str:
    """How SQLAlchemy connects to either of them."""
    return f"mysql+{driver}://{url.partition('://')[2]}"


def numbers(count: int) -> str:
    """A table of the numbers from 1, for statements: MariaDB's sequences are not in MySQL."""
    listed = f"CONCAT('[', REPEAT('0,', {count - 1}), '0]')"
    return f"JSON_TABLE({listed}, '$[*]' COLUMNS (seq FOR ORDINALITY)) AS numbers"


def arguments(url: str) -> dict[str, Any]:
    """What every driver takes: host, port, user, password, database."""
    address = urlsplit(url)
    return {
        "host": address.hostname,
        "port": address.port or 3306,
        "user": unquote(address.username or ""),
        "password": unquote(address.password or ""),
        "database": address.path.lstrip("/"),
    }


def statement(url: str, text: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run one statement, committed at once; return its rows."""
    import pymysql  # only tests that meet a MariaDB need it

    with pymysql.connect(**arguments(url), autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute(text, parameters or None)
        return list(cursor.fetchall())
