"""Idle connections: one that died while nobody used it is replaced before anybody notices."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.stores import idle
from outbox.stores.postgresql import spare
from tests.conftest import MakeOutbox


@pytest.fixture(params=["asyncpg", "psycopg"])
def url(request: pytest.FixtureRequest, postgresql_url: str) -> str:
    return postgresql_url.replace("postgresql:", f"postgresql+{request.param}:", 1)


def asked(engine: Engine) -> list[object]:
    """The questions that the engine's pool asks from now on."""
    questions: list[object] = []
    ping = engine.dialect.do_ping

    def do_ping(connection: object) -> bool:
        questions.append(connection)
        return ping(connection)  # type: ignore[arg-type]

    engine.dialect.do_ping = do_ping  # type: ignore[assignment, method-assign]
    return questions


async def test_who_was_just_used_is_not_asked(
    url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LONGEST_TRUST", 60.0)
    outbox = make_outbox(db_engine_url=url)
    questions = asked(outbox.engines.asynchronous.sync_engine)
    for _ in range(3):
        async with outbox.transaction() as session:
            await session.execute(text("SELECT 1"))
    assert questions == []


async def test_who_died_while_idle_is_replaced_before_anybody_notices(
    url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LONGEST_TRUST", 0.0)
    outbox = make_outbox(db_engine_url=url)
    engine = outbox.engines.asynchronous
    questions = asked(engine.sync_engine)
    made: list[object] = []
    event.listen(engine.sync_engine, "connect", lambda connection, record: made.append(connection))
    processes = []
    for _ in range(2):
        async with engine.connect() as first, engine.connect() as second:
            processes += [await each.scalar(text("SELECT pg_backend_pid()")) for each in (first, second)]
        async with make_outbox(db_engine_url=url).transaction() as session:
            for process in processes:
                await session.execute(text(f"SELECT pg_terminate_backend({process})"))
        await asyncio.sleep(0.1)
    assert len(set(processes)) == len(made) == 4
    assert len(questions) == 1  # what one answer tells goes for all that are as old


async def test_pools_beside_it_ask_nobody(url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses them tries again anyway."""
    monkeypatch.setattr(idle, "LONGEST_TRUST", 0.0)
    outbox = make_outbox(db_engine_url=url)
    engine = outbox.engines.asynchronous
    async with engine.connect():
        pass
    beside = spare(engine.sync_engine)
    questions = asked(engine.sync_engine)
    for _ in range(2):
        async with AsyncEngine(beside).connect() as connection:
            await connection.execute(text("SELECT 1"))
    assert questions == []
    async with engine.connect():
        assert len(questions) == 1
    await AsyncEngine(beside).dispose()
