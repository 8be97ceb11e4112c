"""Drivers: every driver's own connection, by the name that tests know it by."""

from __future__ import annotations

from .driving import (
    Aiosqlite,
    Asyncpg,
    AsyncpgPool,
    AsyncPsycopg,
    Django,
    DjangoAlias,
    DjangoSqlite,
    Driving,
    Psycopg,
    Sqlite,
)
from .driving_mysql import Asyncmy, AsyncmyPool, DjangoMysql, Mysqlclient, Pymysql

DRIVERS: dict[str, type[Driving]] = {
    "asyncpg": Asyncpg,
    "asyncpg-pool": AsyncpgPool,
    "psycopg-async": AsyncPsycopg,
    "psycopg": Psycopg,
    "aiosqlite": Aiosqlite,
    "sqlite3": Sqlite,
    "django-postgresql": Django,
    "django-alias": DjangoAlias,
    "django-sqlite": DjangoSqlite,
    "asyncmy": Asyncmy,
    "asyncmy-pool": AsyncmyPool,
    "pymysql": Pymysql,
    "mysqlclient": Mysqlclient,
    "django-mysql": DjangoMysql,
}
