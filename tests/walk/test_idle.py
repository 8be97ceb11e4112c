"""Idle connections: one that died while nobody used it is replaced before anybody notices."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.stores import runner
from outbox.stores.runner import spare
from tests.support.databases import on_asyncpg
from tests.support.outboxes import MakeOutbox

pytestmark = on_asyncpg


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


def end(url: str, processes: list[int]) -> None:
    """End the server's side of connections, and wait until it has."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        for process in processes:
            connection.execute("SELECT pg_terminate_backend(%s, 60000)", [process])


async def test_who_was_just_used_is_not_asked(
    url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LONGEST_TRUST", 60.0)
    outbox = make_outbox(db_engine_url=url)
    questions = asked(outbox.engines.asynchronous.sync_engine)
    for _ in range(3):
        async with outbox.transaction() as session:
            await session.execute(text("SELECT 1"))
    assert questions == []


@pytest.mark.parametrize("trusted", [0.0, 60.0], ids=["long", "moment"])
async def test_who_died_while_idle_is_replaced_before_anybody_notices(
    trusted: float, url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LONGEST_TRUST", trusted)
    outbox = make_outbox(db_engine_url=url)
    engine = outbox.engines.asynchronous
    questions = asked(engine.sync_engine)
    made: list[object] = []
    event.listen(engine.sync_engine, "connect", lambda connection, record: made.append(connection))
    processes: list[int] = []
    for _ in range(2):
        async with engine.connect() as first, engine.connect() as second:
            processes += [await each.scalar(text("SELECT pg_backend_pid()")) or 0 for each in (first, second)]
        end(url, processes)  # without a turn of the event loop, which might notice
    assert len(set(processes)) == len(made) == 4
    assert len(questions) == 1  # what one answer tells goes for all that are as old


async def test_in_threads_it_is_the_same(
    postgresql_url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LONGEST_TRUST", 60.0)
    engine = make_outbox(db_engine_url=postgresql_url).engines.synchronous
    questions = asked(engine)
    processes: list[int] = []
    for _ in range(2):
        with engine.connect() as connection:
            processes.append(connection.scalar(text("SELECT pg_backend_pid()")) or 0)
        with engine.connect():
            pass
        end(postgresql_url, processes)
    assert len(set(processes)) == 2
    assert len(questions) == 1


async def test_a_file_is_never_asked(tmp_path: Path, make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(db_engine_url=f"sqlite:///{tmp_path / 'outbox.db'}")
    questions = asked(outbox.engines.asynchronous.sync_engine)
    for _ in range(2):
        async with outbox.transaction() as session:
            await session.execute(text("SELECT 1"))
    assert questions == []


async def test_pools_beside_it_ask_nobody(url: str, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses them tries again anyway."""
    monkeypatch.setattr(runner, "LONGEST_TRUST", 0.0)
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
