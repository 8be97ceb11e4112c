"""Fixtures for the behaviour that other projects document: their engine, their User, their module-level outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox as library
from outbox import NEVER, Outbox
from outbox.observers.logging import LoggingObserver
from tests.compatibility.pg_transactional_outbox.movies import Shelf
from tests.support.databases import ASYNCMY, PSYCOPG, SQLITE, url_on
from tests.support.http_sink import HttpSink
from tests.support.observing import Recorder


@pytest.fixture(params=[SQLITE, PSYCOPG])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both databases in turn, PostgreSQL through psycopg, which connects in a third of asyncpg's time.

    What may depend on the driver is marked `on_every_driver`.
    """
    return url_on(request, request.param, tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Edda runs on MySQL too, and so does what it documents, wherever a test does not say otherwise."""
    marks = metafunc.definition.iter_markers("parametrize")
    says_where = any("database_url" in mark.args[0] for mark in marks)
    if ".edda." in metafunc.module.__name__ and "database_url" in metafunc.fixturenames and not says_where:
        databases = pytest.mark.parametrize("database_url", [SQLITE, PSYCOPG, ASYNCMY], indirect=True)
        metafunc.definition.add_marker(databases)  # a mark goes before what the fixture says


@pytest.fixture
async def db_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """The application's own engine, made as the projects make it."""
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(database_url: str) -> Iterator[Engine]:
    """An engine for code without an event loop: sqlite3, psycopg or pymysql, on the same database."""
    url = make_url(database_url)
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    engine = create_engine(url.set(drivername=drivers[url.get_backend_name()]))
    yield engine
    engine.dispose()


@pytest.fixture
async def user_model(db_engine: AsyncEngine, table_name: str) -> type[Any]:
    """The projects' domain entity, in a table of this test's own."""

    class Base(DeclarativeBase):
        """A registry of this test's own."""

    class User(Base):
        __tablename__ = f"{table_name}_users"
        id: Mapped[int] = mapped_column(primary_key=True)
        username: Mapped[str]

    async with db_engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    return User


@pytest.fixture
async def movies(db_engine: AsyncEngine, table_name: str) -> Shelf:
    """What a producer of pg-transactional-outbox writes."""
    shelf = Shelf(db_engine, f"{table_name}_movies")
    await shelf.create()
    return shelf


@pytest.fixture
async def published_movies(db_engine: AsyncEngine, table_name: str) -> Shelf:
    """What its consumer writes."""
    shelf = Shelf(db_engine, f"{table_name}_published")
    await shelf.create()
    return shelf


@pytest.fixture
def make_outbox(db_engine: AsyncEngine, make_outbox: Callable[..., Outbox]) -> Callable[..., Outbox]:
    """Outboxes that are closed before the application's engine is disposed of, as an application would do it."""
    return make_outbox


@pytest.fixture
async def outbox(make_outbox: Callable[..., Outbox], db_engine: AsyncEngine, recorder: Recorder) -> Outbox:
    """One outbox on the application's engine."""
    return make_outbox(db_engine=db_engine, observers=[LoggingObserver(), recorder])


@pytest.fixture
def make_rabbitmq_outbox(
    make_outbox: Callable[..., Outbox], db_engine: AsyncEngine, rabbitmq_url: str, recorder: Recorder
) -> Callable[..., Outbox]:
    """Outboxes on the application's engine and a virtual host of this test's own."""

    def make(**options: Any) -> Outbox:
        broker = {"rabbitmq_url": rabbitmq_url, "observers": [LoggingObserver(), recorder]}
        return make_outbox(**{"db_engine": db_engine, **broker, **options})

    return make


@pytest.fixture
async def rabbitmq_outbox(make_rabbitmq_outbox: Callable[..., Outbox]) -> Outbox:
    """One of these."""
    return make_rabbitmq_outbox()


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    """The broker of edda: whatever takes CloudEvents over HTTP."""
    async with HttpSink() as sink:
        yield sink


@pytest.fixture
def make_http_outbox(make_outbox: Callable[..., Outbox], sink: HttpSink, recorder: Recorder) -> Callable[..., Outbox]:
    """Outboxes that post to that broker, as edda configures them, ask again soon, and keep what they have sent."""

    def make(**options: Any) -> Outbox:
        broker = {"transport": f"{sink.url}/events", "source": "order-service", "relay_retry_delays": (0.01, 0.01)}
        ours = {"clean_up_after": NEVER, "observers": [recorder], "restart_delay": 0.05}
        return make_outbox(**{**broker, **ours, **options})

    return make


@pytest.fixture
async def channel(rabbitmq_url: str) -> AsyncIterator[AbstractChannel]:
    """A channel for looking at that virtual host beside the library."""
    async with await aio_pika.connect(rabbitmq_url) as connection:
        yield await connection.channel()


@pytest.fixture
async def singleton() -> AsyncIterator[Outbox]:
    """The module-level outbox, as new after the test."""
    yield library.outbox
    await library.outbox.close()
    vars(library.outbox).clear()
    Outbox.__init__(library.outbox)
