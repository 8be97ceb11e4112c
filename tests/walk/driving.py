"""Driving: every driver's own connection, driven the same way. Those without an event loop have their own thread."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
import asyncpg
import django
import django.db
import psycopg
from django.conf import settings as django_settings
from django.db import transaction as django_transaction
from django.db.transaction import Atomic

from outbox import Message, Outbox

Result = TypeVar("Result")

if not django_settings.configured:
    django_settings.configure(DATABASES={}, USE_TZ=True)
    django.setup()


class Driving(ABC):
    """One connection, opened for a test. Its first statement is the test's."""

    on = "postgresql+asyncpg"  # and how the outbox itself connects
    connection: Any

    def __init__(self, url: str) -> None:
        self.url = url  # postgresql://… or the path of a SQLite file

    @abstractmethod
    async def open(self, **options: Any) -> None: ...

    @abstractmethod
    async def open_autocommit(self) -> None:
        """A connection on which nothing protects a statement unless a transaction is begun."""

    @abstractmethod
    async def close(self) -> None: ...

    async def end(self) -> None:
        await self.close()

    @abstractmethod
    async def begin(self) -> None:
        """As the driver's users do; nothing where the first statement begins a transaction."""

    @abstractmethod
    async def begin_explicitly(self) -> None: ...

    @abstractmethod
    async def commit(self) -> None: ...

    @abstractmethod
    async def rollback(self) -> None: ...

    @abstractmethod
    async def execute(self, statement: str) -> None: ...

    @abstractmethod
    async def emit(self, outbox: Outbox, *args: Any, **options: Any) -> Message | None: ...

    @abstractmethod
    async def emit_many(self, outbox: Outbox, *args: Any, **options: Any) -> list[Message]: ...

    @abstractmethod
    async def cancel_timer(self, outbox: Outbox, timer_id: str) -> bool: ...

    @abstractmethod
    async def receive(self, outbox: Outbox, queue: str, message: Message) -> bool: ...

    @abstractmethod
    async def mispaired(self, outbox: Outbox) -> list[Callable[[], Any]]:
        """The calls that are meant for the other kind of connection."""

    async def savepoint(self) -> None:
        await self.execute("SAVEPOINT here")

    async def rollback_to_savepoint(self) -> None:
        await self.execute("ROLLBACK TO SAVEPOINT here")


class Awaiting(Driving):
    """Drivers for the event loop."""

    async def emit(self, outbox: Outbox, *args: Any, **options: Any) -> Message | None:
        return await outbox.emit(self.connection, *args, **options)

    async def emit_many(self, outbox: Outbox, *args: Any, **options: Any) -> list[Message]:
        return await outbox.emit_many(self.connection, *args, **options)

    async def cancel_timer(self, outbox: Outbox, timer_id: str) -> bool:
        return await outbox.cancel_timer(self.connection, timer_id)

    async def receive(self, outbox: Outbox, queue: str, message: Message) -> bool:
        return await outbox.receive(self.connection, queue, message)

    async def mispaired(self, outbox: Outbox) -> list[Callable[[], Any]]:
        async def emit_sync() -> None:
            outbox.emit_sync(self.connection, "a", 1)

        async def emit_many_sync() -> None:
            outbox.emit_many_sync(self.connection, "a", [])

        async def cancel_timer_sync() -> None:
            outbox.cancel_timer_sync(self.connection, "t")

        async def receive_sync() -> None:
            outbox.receive_sync(self.connection, "q", Message(routing_key="a", body=b""))

        return [emit_sync, emit_many_sync, cancel_timer_sync, receive_sync]

    async def execute(self, statement: str) -> None:
        await self.connection.execute(statement)


class Asyncpg(Awaiting):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._transactions: list[Any] = []

    async def open(self, **options: Any) -> None:
        self.connection = await asyncpg.connect(self.url, **options)

    async def open_autocommit(self) -> None:
        await self.open()

    async def close(self) -> None:
        await self.connection.close()

    async def begin(self) -> None:
        self._transactions.append(self.connection.transaction())
        await self._transactions[-1].start()

    savepoint = begin

    async def begin_explicitly(self) -> None:
        await self.connection.execute("BEGIN")

    async def commit(self) -> None:
        await (self._transactions.pop().commit() if self._transactions else self.connection.execute("COMMIT"))

    async def rollback(self) -> None:
        await (self._transactions.pop().rollback() if self._transactions else self.connection.execute("ROLLBACK"))

    rollback_to_savepoint = rollback


class AsyncpgPool(Asyncpg):
    async def open(self, **options: Any) -> None:
        self._pool = await asyncpg.create_pool(self.url, min_size=1, max_size=1, **options)
        self.connection = await self._pool.acquire()

    async def close(self) -> None:
        await self._pool.release(self.connection)
        await self._pool.close()


class BegunByStatements(Awaiting):
    """Drivers whose connections begin a transaction with the first statement, and end it themselves."""

    async def close(self) -> None:
        await self.connection.close()

    async def begin(self) -> None: ...

    async def begin_explicitly(self) -> None:
        await self.connection.execute("BEGIN")

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()


class AsyncPsycopg(BegunByStatements):
    async def open(self, **options: Any) -> None:
        self.connection = await psycopg.AsyncConnection.connect(self.url, **options)

    async def open_autocommit(self) -> None:
        await self.open(autocommit=True)


class Aiosqlite(BegunByStatements):
    on = "sqlite"

    async def open(self, **options: Any) -> None:
        self.connection = await aiosqlite.connect(self.url, **options)

    async def open_autocommit(self) -> None:
        await self.open(isolation_level=None)


class Threaded(Driving):
    """Drivers without an event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._thread = ThreadPoolExecutor(1)

    async def run(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        here = copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: here.run(work, *args, **options))

    async def close(self) -> None:
        await self.run(lambda: self.connection.close())  # looked up there, for Django's differ from thread to thread

    async def end(self) -> None:
        await super().end()
        self._thread.shutdown()

    async def begin(self) -> None: ...

    async def begin_explicitly(self) -> None:
        await self.execute("BEGIN")

    async def commit(self) -> None:
        await self.run(lambda: self.connection.commit())

    async def rollback(self) -> None:
        await self.run(lambda: self.connection.rollback())

    async def execute(self, statement: str) -> None:
        await self.run(self.connection.execute, statement)

    async def emit(self, outbox: Outbox, *args: Any, **options: Any) -> Message | None:
        return await self.run(outbox.emit_sync, self.connection, *args, **options)

    async def emit_many(self, outbox: Outbox, *args: Any, **options: Any) -> list[Message]:
        return await self.run(outbox.emit_many_sync, self.connection, *args, **options)

    async def cancel_timer(self, outbox: Outbox, timer_id: str) -> bool:
        return await self.run(outbox.cancel_timer_sync, self.connection, timer_id)

    async def receive(self, outbox: Outbox, queue: str, message: Message) -> bool:
        return await self.run(outbox.receive_sync, self.connection, queue, message)

    async def mispaired(self, outbox: Outbox) -> list[Callable[[], Any]]:
        return [
            lambda: outbox.emit(self.connection, "a", 1),
            lambda: outbox.emit_many(self.connection, "a", []),
            lambda: outbox.cancel_timer(self.connection, "t"),
            lambda: outbox.receive(self.connection, "q", Message(routing_key="a", body=b"")),
        ]


class Psycopg(Threaded):
    async def open(self, **options: Any) -> None:
        self.connection = await self.run(psycopg.Connection.connect, self.url, **options)

    async def open_autocommit(self) -> None:
        await self.open(autocommit=True)


class Sqlite(Threaded):
    on = "sqlite"

    async def open(self, **options: Any) -> None:
        self.connection = await self.run(sqlite3.connect, self.url, **options)

    async def open_autocommit(self) -> None:
        await self.open(isolation_level=None)


class Django(Threaded):
    """`django.db.connection`, with the test's database as the default one."""

    engine = "postgresql"

    async def open(self, **options: Any) -> None:
        address = psycopg.conninfo.conninfo_to_dict(self.url)
        await self._open(
            NAME=address["dbname"],
            USER=address.get("user", ""),
            PASSWORD=address.get("password", ""),
            HOST=address.get("host", ""),
            PORT=str(address.get("port", "")),
            **options,
        )

    async def _open(self, **database: Any) -> None:
        databases = {"default": {"ENGINE": f"django.db.backends.{self.engine}", **database}}
        django.db.connections.settings = django.db.connections.configure_settings(databases)
        self.connection = django.db.connection
        self._blocks: list[Atomic] = []

    async def open_autocommit(self) -> None:
        await self.open()

    async def begin(self) -> None:
        block = django_transaction.atomic()
        await self.run(block.__enter__)
        self._blocks.append(block)

    begin_explicitly = savepoint = begin

    async def commit(self) -> None:
        await self.run(self._blocks.pop().__exit__, None, None, None)

    async def rollback(self) -> None:
        await self.run(django_transaction.set_rollback, True)
        await self.commit()

    async def rollback_to_savepoint(self) -> None:
        await self.rollback()

    async def execute(self, statement: str) -> None:
        def work() -> None:
            with self.connection.cursor() as cursor:
                cursor.execute(statement)

        await self.run(work)


class DjangoAlias(Django):
    """`django.db.connections[…]`."""

    async def _open(self, **database: Any) -> None:
        await super()._open(**database)
        self.connection = await self.run(lambda: django.db.connections["default"])


class DjangoSqlite(Django):
    on = "sqlite"
    engine = "sqlite3"

    async def open(self, **options: Any) -> None:
        await self._open(NAME=Path(self.url), **options)
