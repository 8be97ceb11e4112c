"""Warnings: each names the line of the application that led to it, and what to write in its kind of code."""

from __future__ import annotations

import asyncio
import linecache
import sqlite3
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiosqlite
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, NotAtomicWarning, Outbox

MESSAGE = Message(routing_key="order.paid", body=b"1")


@pytest.fixture
async def outbox(tmp_path: Path) -> AsyncIterator[Outbox]:
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    await outbox.create_tables()
    yield outbox
    await outbox.close()


@contextmanager
def warned(category: type[Warning], said: str, line: str) -> Iterator[None]:
    """One warning, that names this file and a line that holds this text."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", category)
        yield
    [warning] = [each for each in given if issubclass(each.category, category)]
    assert warning.filename == __file__
    assert line in linecache.getline(__file__, warning.lineno)
    assert said in str(warning.message)


async def test_an_emit_in_autocommit_is_named_by_its_line(outbox: Outbox, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db", isolation_level="AUTOCOMMIT")
    with warned(NotAtomicWarning, "AUTOCOMMIT", "await outbox.emit(session"):
        async with AsyncSession(engine) as session, session.begin():
            await outbox.emit(session, "order.created", 1)
    with warned(NotAtomicWarning, "AUTOCOMMIT", "await outbox.emit_many(connection"):
        async with engine.connect() as connection:
            await outbox.emit_many(connection, "order.created", [1])
    await engine.dispose()


async def test_an_emit_on_a_drivers_connection_is_named_by_its_line(outbox: Outbox, tmp_path: Path) -> None:
    async with aiosqlite.connect(tmp_path / "shop.db", isolation_level=None) as connection:
        with warned(NotAtomicWarning, "without an open transaction", "await outbox.emit(connection"):
            await outbox.emit(connection, "order.created", 1)
    plain = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with warned(NotAtomicWarning, "without an open transaction", "outbox.emit_sync(plain"):
        outbox.emit_sync(plain, "order.created", 1)
    plain.close()


async def test_a_forgotten_commit_is_named_by_the_line_of_the_emit(outbox: Outbox, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    with warned(NotAtomicWarning, "Call `await session.commit()`, or begin with `async with", "outbox.emit(session"):
        async with AsyncSession(engine) as session:
            await outbox.emit(session, "order.created", 1)
    await engine.dispose()
    assert await outbox.messages() == []


def test_sync_code_is_told_of_a_forgotten_commit_in_its_own_words(tmp_path: Path) -> None:
    outbox = Outbox(db_engine_url=f"sqlite:///{tmp_path}/shop.db")
    asyncio.run(outbox.create_tables())
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    said = "Call `session.commit()`, or begin with `with session"
    with warned(NotAtomicWarning, said, "outbox.emit_sync(session"), Session(engine) as session:
        outbox.emit_sync(session, "order.created", 1)
    engine.dispose()


async def test_the_first_emit_after_a_commit_is_the_one_that_is_named(outbox: Outbox, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    with warned(NotAtomicWarning, "after 1 emit(s)", '"order.forgotten"'):
        async with AsyncSession(engine) as session:
            await outbox.emit(session, "order.created", 1)
            await session.commit()
            await outbox.emit(session, "order.forgotten", 1)
    await engine.dispose()
    assert len(await outbox.messages()) == 1


async def test_a_session_by_keyword_still_receives_and_is_deprecated_by_the_callers_line(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        with warned(DeprecationWarning, "receive(session, queue, message)", "await outbox.receive("):
            assert await outbox.receive("orders", MESSAGE, session=session, unwanted="wait")
        assert not await outbox.receive(session, "orders", MESSAGE, unwanted="wait")
    assert not await outbox.receive("orders", MESSAGE)


def test_sync_code_receives_with_the_session_first_or_by_keyword(tmp_path: Path) -> None:
    outbox = Outbox(db_engine_url=f"sqlite:///{tmp_path}/shop.db")
    asyncio.run(outbox.create_tables())
    with outbox.transaction_sync() as session:
        assert outbox.receive_sync(session, "orders", MESSAGE, unwanted="wait")
        assert not outbox.receive_sync(session, queue="orders", message=MESSAGE)
        with warned(DeprecationWarning, "receive(session, queue, message)", "outbox.receive_sync("):
            assert not outbox.receive_sync("orders", MESSAGE, session=session)


async def test_receiving_refuses_too_many_and_too_few_arguments(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        with pytest.raises(TypeError, match="message"):
            await outbox.receive("orders")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="4 were given"):
            await outbox.receive(session, "orders", MESSAGE, "wait")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="limit"):
            await outbox.receive(session, "orders", MESSAGE, limit=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="needs a session"):
        outbox.receive_sync("orders", MESSAGE)  # type: ignore[call-overload]


def test_a_transaction_without_a_loop_commits_or_rolls_back(tmp_path: Path) -> None:
    outbox = Outbox(db_engine_url=f"sqlite:///{tmp_path}/shop.db")
    asyncio.run(outbox.create_tables())
    with outbox.transaction_sync() as session:
        outbox.emit_sync(session, "order.created", 1)
    with pytest.raises(ValueError, match="no"), outbox.transaction_sync() as session:
        outbox.emit_sync(session, "order.refused", 1)
        raise ValueError("no")
    assert [stored.message.routing_key for stored in asyncio.run(outbox.messages())] == ["order.created"]
