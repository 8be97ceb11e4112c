"""What stores, sessions and engines use of other libraries without their promise: it is still there, and works so.

A library may change these in any release. A failure here names the version, the file that uses it, and what for. Those
of the brokers' and HTTP clients are guarded beside the tests of their transports.
"""

from __future__ import annotations

import ast
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import pytest
from sqlalchemy import Connection, Engine, QueuePool, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

SOURCES = Path(__file__).parents[2] / "src/outbox"
# Of a row, of an enumeration, of os, of sys, of a named tuple: public in spite of the underscore.
DOCUMENTED = {"_mapping", "_value_", "_exit", "_getframe", "_asdict", "_fields"}
IN_TEST_MYSQL_ENDS = {"_result"}  # of connections of asyncmy and pymysql, on a server of theirs
GUARDED_ELSEWHERE = ("transports/",)


@dataclass(frozen=True)
class Interface:
    """A private interface of a library."""

    library: str
    name: str
    what_for: str
    seen_with: tuple[str, ...]
    check: Callable[[str], Awaitable[None]]  # takes the URL of a PostgreSQL

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise AssertionError(
                f"{self.library} {version(self.library)} has no {self.name} that works as in "
                f"{' and '.join(self.seen_with)}, which is used {self.what_for}: {type(error).__name__}: {error}"
            ) from error


INTERFACES: list[Interface] = []

SQLALCHEMY = ("2.0.57", "2.1.8")
ASYNCPG = ("0.32.0",)
AIOSQLITE = ("0.22.1",)


def interface(
    library: str, seen_with: tuple[str, ...], name: str, what_for: str
) -> Callable[[Callable[[str], Awaitable[None]]], None]:
    def add(check: Callable[[str], Awaitable[None]]) -> None:
        INTERFACES.append(Interface(library, name, what_for, seen_with, check))

    return add


# SQLAlchemy.


def engine_on_a_file(**options: Any) -> Engine:
    return create_engine("sqlite://", poolclass=QueuePool, connect_args={"check_same_thread": False}, **options)


@interface("sqlalchemy", SQLALCHEMY, "Pool._pre_ping", "to connect beside a pool without a ping")
async def pre_ping(_: str) -> None:
    engine = engine_on_a_file(pool_pre_ping=True)
    pings = []
    dialect: Any = engine.dialect
    ping = dialect.do_ping
    dialect.do_ping = lambda connection: pings.append(1) or ping(connection)
    pool: Any = engine.pool.recreate()
    pinged = []
    for pool._pre_ping in (True, False):
        for _again in range(2):
            pool.connect().close()
        pinged.append(len(pings))
        pings.clear()
    pool.dispose()
    assert pinged == [1, 0], f"it pinged {pinged} times"


@interface("sqlalchemy", SQLALCHEMY, "PoolProxiedConnection._pool", "to tell whose pool gives a connection out")
async def pool_of_a_proxy(_: str) -> None:
    engine = engine_on_a_file()
    pools: list[Any] = []
    event.listen(engine, "checkout", lambda connection, record, proxy: pools.append(proxy._pool))
    engine.connect().close()
    assert pools == [engine.pool]
    engine.dispose()


@interface(
    "sqlalchemy",
    SQLALCHEMY,
    "Dialect._on_connect_isolation_level",
    "to see that an engine commits each statement by itself",
)
async def isolation_of_an_engine(_: str) -> None:
    automatic: Any = create_engine("sqlite://", isolation_level="AUTOCOMMIT").dialect
    ordinary: Any = create_engine("sqlite://").dialect
    assert automatic._on_connect_isolation_level == "AUTOCOMMIT"
    assert ordinary._on_connect_isolation_level is None


@interface(
    "sqlalchemy",
    SQLALCHEMY,
    "SessionTransaction._connections",
    "to see that a session's transaction is on one connection, and whose that is",
)
async def connections_of_a_session(_: str) -> None:
    engine = create_engine("sqlite://")
    for bind, closes_it in ((engine, True), (engine.connect(), False)):
        with Session(bind) as session:
            connection = session.connection()
            held: Any = session.get_transaction()
            assert {*held._connections} == {connection, connection.engine}
            found, begun, is_sessions_own, closes = held._connections[connection]
            assert found is connection and hasattr(begun, "close")
            assert is_sessions_own is True and closes is closes_it
    engine.dispose()


@interface(
    "sqlalchemy",
    SQLALCHEMY,
    "Connection._commit_impl, _rollback_impl and _commit_twophase_impl",
    "to hear that a commit has happened, and to keep a listener from ending its transaction",
)
async def ends_of_a_connection(_: str) -> None:
    ended: list[str] = []
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        watch(connection, "_commit_impl", ended)
        watch(connection, "_rollback_impl", ended)
        connection.execute(text("SELECT 1"))
        connection.commit()
        connection.execute(text("SELECT 1"))
        connection.rollback()
        with Session(connection) as session:
            session.execute(text("SELECT 1"))
            session.commit()
    assert ended == ["_commit_impl", "_rollback_impl", "_commit_impl"]
    assert callable(Connection._commit_twophase_impl)
    engine.dispose()


def watch(connection: Connection, name: str, ended: list[str]) -> None:
    end = getattr(connection, name)
    setattr(connection, name, lambda: ended.append(name) or end())


@interface("sqlalchemy", SQLALCHEMY, "Session._flushing", "to tell SQLAlchemy's own rollback from a listener's")
async def a_flush(_: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Thing(Base):
        __tablename__ = "thing"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        observed: Any = session
        flushing: list[bool] = []
        event.listen(session, "before_flush", lambda *_: flushing.append(observed._flushing))
        assert observed._flushing is False
        session.add(Thing(id=1))
        session.flush()
    assert flushing == [True]
    engine.dispose()


# asyncpg.


@interface(
    "asyncpg", ASYNCPG, "Connection._transport", "to see bytes that were sent unasked, and to cut forked sockets"
)
async def transport_of_a_connection(url: str) -> None:
    connection: Any = await asyncpg.connect(url)
    try:
        assert connection._transport.get_extra_info("socket").fileno() > 0
    finally:
        await connection.close()


@interface(
    "sqlalchemy",
    SQLALCHEMY,
    "the _transaction of its connection of asyncpg",
    "to see that a commit would send nothing, because the driver's connection was closed",
)
async def transaction_of_an_adapter(url: str) -> None:
    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
    async with engine.connect() as connection:
        adapter: Any = (await connection.get_raw_connection()).dbapi_connection
        assert adapter._transaction is None
        await connection.execute(text("SELECT 1"))
        assert adapter._transaction is not None
        await connection.run_sync(lambda _: adapter.terminate())
        assert adapter._transaction is None
        await connection.commit()
    await engine.dispose()


@interface("asyncpg", ASYNCPG, "Connection._protocol.is_in_transaction", "to see that the driver ended a transaction")
async def transaction_of_a_connection(url: str) -> None:
    connection: Any = await asyncpg.connect(url)
    try:
        told = [connection._protocol.is_in_transaction()]
        for statement in ("BEGIN", "SELECT 1", "ROLLBACK"):
            await connection.execute(statement)
            told.append(connection._protocol.is_in_transaction())
        assert told == [False, True, True, False]
    finally:
        await connection.close()


@interface("asyncpg", ASYNCPG, "Connection._protocol.queries_count", "to see that a listener used the driver itself")
async def queries_of_a_connection(url: str) -> None:
    connection: Any = await asyncpg.connect(url)
    try:
        before = connection._protocol.queries_count
        await connection.fetch("SELECT 1")
        await connection.execute("SELECT 1")
        assert connection._protocol.queries_count >= before + 2
    finally:
        await connection.close()


# aiosqlite.


@interface(
    "aiosqlite",
    AIOSQLITE,
    "Connection._conn and _execute",
    "to run work as a whole in the thread of the connection, which is the only one to a database in memory",
)
async def thread_of_a_connection(_: str) -> None:
    async with aiosqlite.connect(":memory:") as connection:
        own: Any = connection
        assert isinstance(own._conn, sqlite3.Connection)

        def work(number: int) -> tuple[int, int]:
            return own._conn.execute("SELECT ?", (number,)).fetchone()[0], threading.get_ident()

        answer, thread = await own._execute(work, 7)
        assert answer == 7 and thread != threading.get_ident()
        assert (await own._execute(work, 8)) == (8, thread)


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda each: f"{each.library}-{each.check.__name__}")
async def test_it_is_there_and_works_as_it_did(interface: Interface, postgresql_url: str) -> None:
    with interface.explained():
        await interface.check(postgresql_url)


def test_no_other_private_interface_is_used() -> None:
    trees = {file: ast.parse(file.read_text()) for file in SOURCES.rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    listed = " ".join(interface.name for interface in INTERFACES)
    found = {
        f"{file.relative_to(SOURCES).as_posix()}: {name}"
        for file, tree in trees.items()
        if not file.relative_to(SOURCES).as_posix().startswith(GUARDED_ELSEWHERE)
        for name in _used(tree)
        if name not in ours | DOCUMENTED | IN_TEST_MYSQL_ENDS and name not in listed
    }
    assert not found, "these are not ours and not promised by anybody: check them above, or do without"


def _defined(tree: ast.AST) -> Iterator[str]:
    """What a module gives a private name to."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Constant(value=str(name)):  # in __slots__
                if name.startswith("_") and name.isidentifier() and not _is_asked_for(tree, node):
                    yield name
            case _:
                pass


def _is_asked_for(tree: ast.AST, constant: ast.Constant) -> bool:
    return any(
        isinstance(node, ast.Call) and constant in node.args and isinstance(node.func, ast.Name)
        for node in ast.walk(tree)
    )


def _used(tree: ast.AST) -> Iterator[str]:
    """Private names of anything but the object itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__"):
            yield name
