"""Driving the drivers of MariaDB and MySQL, like the others."""

from __future__ import annotations

from typing import Any

import asyncmy
import pymysql

from tests.support.mariadb import arguments

from .driving import Awaiting, Django, Threaded
from .mysqlclient import mysqldb


class Asyncmy(Awaiting):
    on = "mariadb+asyncmy"

    async def open(self, **options: Any) -> None:
        self.connection = await asyncmy.connect(**arguments(self.url), **options)

    async def open_autocommit(self) -> None:
        await self.open(autocommit=True)

    async def close(self) -> None:
        await self.connection.ensure_closed()

    async def begin(self) -> None: ...

    async def begin_explicitly(self) -> None:
        await self.connection.begin()

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()

    async def execute(self, statement: str) -> None:
        async with self.connection.cursor() as cursor:
            await cursor.execute(statement)


class AsyncmyPool(Asyncmy):
    async def open(self, **options: Any) -> None:
        self._pool = await asyncmy.create_pool(minsize=1, maxsize=1, **arguments(self.url), **options)
        self.connection = await self._pool.acquire()

    async def close(self) -> None:
        self._pool.release(self.connection)
        self._pool.close()
        await self._pool.wait_closed()


class Pymysql(Threaded):
    on = "mariadb+asyncmy"

    async def open(self, **options: Any) -> None:
        self.connection = await self.run(pymysql.connect, **arguments(self.url), **options)

    async def open_autocommit(self) -> None:
        await self.open(autocommit=True)

    async def begin_explicitly(self) -> None:
        await self.run(self.connection.begin)

    async def execute(self, statement: str) -> None:
        await self.run(self.connection.query, statement)


class Mysqlclient(Pymysql):
    async def open(self, **options: Any) -> None:
        options = {"charset": "utf8mb4", **options}
        self.connection = await self.run(mysqldb().connect, **arguments(self.url), **options)

    async def execute(self, statement: str) -> None:
        def work() -> None:
            with self.connection.cursor() as cursor:
                cursor.execute(statement)

        await self.run(work)


class DjangoMysql(Django):
    on = "mariadb+asyncmy"
    engine = "mysql"

    async def open(self, **options: Any) -> None:
        mysqldb()
        given = arguments(self.url)
        address = {name.upper(): str(given[name]) for name in ("host", "port", "user", "password")}
        await self._open(NAME=given["database"], **address, **options)
