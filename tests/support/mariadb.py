"""MariaDB: what a test says to a server from outside, over a connection of its own."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit


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
