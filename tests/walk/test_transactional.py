"""Functions that get their transaction by annotation, and what is done after a commit."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, insert, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, registry, scoped_session, sessionmaker

from outbox import Message, NotAtomicWarning, Outbox, TransactionError, listen
from outbox.adapters import sync_url
from outbox.core.events import Handled, HookFailed, Received
from outbox.sqlite import prepare
from tests.support.databases import on_asyncpg, on_sqlite
from tests.support.observing import Recorder
from tests.support.outboxes import MakeOutbox


class Failure(Exception):
    """What an application raises."""


class Order(BaseModel):
    number: int
    fails: bool = False


async def tenant() -> str:
    return "acme"


class Row:
    """An order, as SQLAlchemy maps it."""

    def __init__(self, id: int) -> None:
        self.id = id


class Shop:
    """An application with one table of its own, which is written together with messages."""

    def __init__(self, outbox: Outbox, table_name: str) -> None:
        self.outbox = outbox
        self.orders = Table(
            f"{table_name}_orders", MetaData(), Column("id", Integer, primary_key=True, autoincrement=False)
        )
        self.told: list[str] = []
        self.place = outbox.transactional(self.write)
        self.place_now = outbox.transactional(self.write_now)

    async def write(self, number: int, session: AsyncSession, fails: bool = False) -> AsyncSession:
        await session.execute(insert(self.orders).values(id=number))
        await self.outbox.emit(session, "order.placed", number)
        self.outbox.after_commit(session, lambda: self.told.append(f"placed {number}"))
        if fails:
            raise Failure
        return session

    def write_now(self, number: int, session: Session, fails: bool = False) -> Session:
        session.execute(insert(self.orders).values(id=number))
        self.outbox.emit_sync(session, "order.placed", number)
        self.outbox.after_commit(session, lambda: self.told.append(f"placed {number}"))
        if fails:
            raise Failure
        return session

    async def kept(self, *numbers: int) -> bool:
        """Whether these orders are there and no others, with their messages, and their hooks have run."""
        async with self.outbox.transaction() as session:
            orders = set(await session.scalars(select(self.orders.c.id)))
        messages = {int(stored.message.body) for stored in await self.outbox.messages()}
        return orders == messages == set(numbers) and sorted(self.told) == sorted(f"placed {each}" for each in numbers)


@pytest.fixture
async def shop(make_outbox: MakeOutbox, table_name: str) -> AsyncIterator[Shop]:
    shop = Shop(make_outbox(log=False), table_name)
    engine = shop.outbox.engines.asynchronous
    async with engine.begin() as connection:
        await connection.run_sync(shop.orders.create)
    await shop.outbox.create_tables()
    yield shop
    async with engine.begin() as connection:
        await connection.run_sync(shop.orders.drop)


@pytest.fixture
async def own_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An engine of the application's own."""
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        prepare(engine)
    yield engine
    await engine.dispose()


def plain_engine(database_url: str) -> Engine:
    engine = create_engine(sync_url(make_url(database_url)))
    if engine.dialect.name == "sqlite":
        prepare(engine)
    return engine


# The transaction


async def test_returning_commits_data_message_and_hooks_together(shop: Shop) -> None:
    session = await shop.place(1)
    assert not session.in_transaction()
    assert await shop.kept(1)


async def test_an_exception_rolls_everything_back_and_reaches_the_caller(shop: Shop) -> None:
    with pytest.raises(Failure):
        await shop.place(1, fails=True)
    assert await shop.kept()


async def test_a_cancelled_function_leaves_nothing(shop: Shop) -> None:
    written = asyncio.Event()

    @shop.outbox.transactional
    async def place_slowly(number: int, session: AsyncSession) -> None:
        await shop.write(number, session)
        written.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(place_slowly(1))
    await written.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await shop.kept()


async def test_what_the_database_refuses_at_the_commit_takes_message_and_hook_with_it(shop: Shop) -> None:
    mapped = registry()
    mapped.map_imperatively(Row, shop.orders)

    @shop.outbox.transactional
    async def place_unflushed(number: int, session: AsyncSession) -> None:
        session.add(Row(number))
        await shop.outbox.emit(session, "order.placed", number)
        shop.outbox.after_commit(session, lambda: shop.told.append("never"))

    await shop.place(1)
    with pytest.raises(IntegrityError):
        await place_unflushed(1)
    mapped.dispose()
    assert await shop.kept(1)


async def _leave(session: AsyncSession) -> None:
    async with session:
        pass


def _leave_now(session: Session) -> None:
    with session:
        pass


@pytest.mark.parametrize("way", [AsyncSession.close, AsyncSession.reset, _leave])
@pytest.mark.parametrize("emits", [True, False])
@pytest.mark.filterwarnings("ignore:a session was closed without commit:outbox.NotAtomicWarning")
async def test_a_session_that_is_closed_inside_does_not_count_as_committed(shop: Shop, way: Any, emits: bool) -> None:
    async def write_and_close(session: AsyncSession) -> str:
        await session.execute(insert(shop.orders).values(id=1))
        if emits:
            await shop.outbox.emit(session, "order.placed", 1)
        await way(session)
        return "stored"

    place = shop.outbox.transactional(write_and_close)
    with pytest.raises(TransactionError, match="closed before the end"):
        await place()
    with pytest.raises(TransactionError, match="closed before the end"):
        async with shop.outbox.transaction() as session:
            await write_and_close(session)
    with pytest.raises(TransactionError, match="closed before the end"):
        async with shop.outbox.transaction() as session:
            await session.execute(insert(shop.orders).values(id=2))
            await place()
    assert await shop.kept()


@pytest.mark.parametrize("way", [Session.close, Session.reset, _leave_now])
@pytest.mark.filterwarnings("ignore:a session was closed without commit:outbox.NotAtomicWarning")
async def test_a_plain_session_that_is_closed_inside_does_not_count_as_committed(shop: Shop, way: Any) -> None:
    def write_and_close(session: Session) -> str:
        session.execute(insert(shop.orders).values(id=1))
        shop.outbox.emit_sync(session, "order.placed", 1)
        way(session)
        return "stored"

    with pytest.raises(TransactionError, match="closed before the end"):
        await asyncio.to_thread(shop.outbox.transactional(write_and_close))
    assert await shop.kept()


async def test_what_is_committed_or_rolled_back_inside_is_taken_as_it_was_meant(shop: Shop) -> None:
    async with shop.outbox.transaction() as session:
        await shop.write(1, session)
        await session.rollback()
    async with shop.outbox.transaction() as session:
        await shop.write(2, session)
        await session.commit()
    assert await shop.kept(2)


async def test_plain_functions_get_a_plain_session(shop: Shop) -> None:
    session = await asyncio.to_thread(shop.place_now, 1)
    assert isinstance(session, Session)
    with pytest.raises(Failure):
        await asyncio.to_thread(shop.place_now, 2, fails=True)
    assert await shop.kept(1)


async def test_a_plain_engine_serves_plain_functions(shop: Shop, database_url: str, table_name: str) -> None:
    engine = plain_engine(database_url)
    plain = Shop(Outbox(db_engine=engine, table_name=table_name, log=False), table_name)
    await asyncio.to_thread(plain.place_now, 1)
    await plain.outbox.close()
    shop.told = plain.told
    assert await shop.kept(1)
    with engine.connect():
        pass  # whoever gave it still has it
    engine.dispose()


# One inside another


async def test_a_call_inside_is_a_savepoint_that_can_fail_alone(shop: Shop) -> None:
    @shop.outbox.transactional
    async def place_with_a_gift(number: int, session: AsyncSession) -> None:
        await shop.write(number, session)
        with pytest.raises(Failure):
            await shop.place(100 + number, fails=True)
        await shop.place(200 + number)

    await place_with_a_gift(1)
    assert await shop.kept(1, 201)


async def test_what_a_call_inside_has_done_is_taken_back_with_everything_else(shop: Shop) -> None:
    @shop.outbox.transactional
    async def place_and_fail(session: AsyncSession) -> None:
        assert await shop.place(1) is session
        raise Failure

    with pytest.raises(Failure):
        await place_and_fail()
    assert await shop.kept()


async def test_a_call_inside_never_commits_alone_in_memory_either() -> None:
    outbox = Outbox(db_engine_url="sqlite://", log=False)

    @outbox.transactional
    async def inner(session: AsyncSession) -> None:
        await outbox.emit(session, "order.placed", 1)

    @outbox.transactional
    async def outer(session: AsyncSession, fails: bool) -> None:
        await inner()  # the first statement of the transaction is a savepoint
        if fails:
            raise Failure

    with pytest.raises(Failure):
        await outer(fails=True)
    assert await outbox.messages() == []
    await outer(fails=False)
    assert len(await outbox.messages()) == 1
    await outbox.close()


async def test_a_call_inside_a_call_inside_is_a_savepoint_of_a_savepoint(shop: Shop) -> None:
    @shop.outbox.transactional
    async def inner(session: AsyncSession) -> None:
        await shop.place(2)
        with pytest.raises(Failure):
            await shop.place(3, fails=True)
        raise Failure

    @shop.outbox.transactional
    async def outer(session: AsyncSession) -> None:
        await shop.place(1)
        with pytest.raises(Failure):
            await inner()
        await shop.place(4)

    await outer()
    assert await shop.kept(1, 4)


async def test_a_call_inside_transaction_is_a_savepoint_too(shop: Shop) -> None:
    async with shop.outbox.transaction() as session:
        with pytest.raises(Failure):
            await shop.place(1, fails=True)
        assert await shop.place(2) is session
        assert not shop.told
    assert await shop.kept(2)


async def test_plain_functions_nest_as_well(shop: Shop) -> None:
    @shop.outbox.transactional
    def place_both(session: Session) -> None:
        assert shop.place_now(1) is session
        with pytest.raises(Failure):
            shop.place_now(2, fails=True)

    await asyncio.to_thread(place_both)
    assert await shop.kept(1)


async def test_a_plain_function_inside_an_awaiting_one_is_refused_with_advice(shop: Shop) -> None:
    async with shop.outbox.transaction():
        with pytest.raises(TransactionError, match=r"write_now.*make it `async def`"):
            shop.place_now(1)
    assert await shop.kept()


async def test_a_call_with_a_session_joins_its_transaction(shop: Shop, own_engine: AsyncEngine) -> None:
    async with AsyncSession(own_engine) as session:
        assert await shop.place(1, session) is session
        assert await shop.place(2, session=session) is session
        await session.rollback()
        await shop.place(3, session)
        assert not shop.told
        await session.commit()
    assert await shop.kept(3)


async def test_a_call_with_no_session_in_its_place_gets_one(shop: Shop) -> None:
    await shop.place(1, session=None)
    await shop.place(number=2)
    with pytest.raises(Failure):
        await shop.place(3, True)  # as if there were no session
    with pytest.raises(Failure):
        await shop.place(4, True, session=None)
    assert await shop.kept(1, 2)


async def test_a_session_that_is_passed_by_name_leaves_any_number_of_places_to_others(shop: Shop) -> None:
    @shop.outbox.transactional
    async def place(*numbers: int, session: AsyncSession) -> None:
        for number in numbers:
            await shop.write(number, session)

    @shop.outbox.transactional
    def place_now(*numbers: int, session: Session) -> None:
        for number in numbers:
            shop.write_now(number, session)

    await place(1, 2, 3)
    await place()
    await asyncio.to_thread(place_now, 4, 5, 6)
    async with shop.outbox.transaction() as session:
        await place(7, 8, session=session)
    assert await shop.kept(*range(1, 9))


async def test_a_session_in_the_first_place_is_found_there(shop: Shop) -> None:
    @shop.outbox.transactional
    async def place(session: AsyncSession, number: int) -> None:
        await shop.write(number, session)

    await place(1)
    async with shop.outbox.transaction() as session:
        await place(session, 2)
    await place(number=3)
    assert await shop.kept(1, 2, 3)


async def test_a_task_that_is_started_inside_has_a_transaction_of_its_own(shop: Shop) -> None:
    tasks = []

    @shop.outbox.transactional
    async def place_and_start_another(session: AsyncSession) -> None:
        tasks.append(asyncio.create_task(shop.place(2)))
        await shop.write(1, session)
        raise Failure

    with pytest.raises(Failure):
        await place_and_start_another()
    assert await tasks[0] is not None
    assert await shop.kept(2)


@on_asyncpg  # a file takes one writer
async def test_functions_of_two_outboxes_do_not_share_a_transaction(
    shop: Shop, make_outbox: MakeOutbox, table_name: str
) -> None:
    other = Shop(make_outbox(log=False), table_name)

    @shop.outbox.transactional
    async def place_elsewhere(session: AsyncSession) -> None:
        assert await other.place(1) is not session
        raise Failure

    with pytest.raises(Failure):
        await place_elsewhere()
    shop.told = other.told
    assert await shop.kept(1)


async def test_many_at_once_do_not_meet(shop: Shop) -> None:
    await asyncio.gather(*map(shop.place, range(20)))
    assert await shop.kept(*range(20))


# Beside listeners and web frameworks


async def test_a_listener_shares_the_workers_transaction(make_outbox: MakeOutbox, shop: Shop) -> None:
    recorder = Recorder()
    serving = make_outbox(observers=[recorder])

    @listen("order.wanted", queue="wanted", retry_delays=(0,))
    @serving.transactional
    async def place(number: int, session: AsyncSession, attempt_count: int) -> None:
        await shop.write(number, session, fails=attempt_count == 1)

    async with serving.running(listeners=[place]):
        async with serving.transaction() as session:
            await serving.emit(session, "order.wanted", 1)
        await recorder.wait_for(Handled, 2)
    stored = await shop.outbox.messages()
    assert [each.message.routing_key for each in stored] == ["order.placed"]
    assert await shop.kept(1)


@on_sqlite
async def test_a_method_can_listen_with_the_workers_transaction(make_outbox: MakeOutbox, shop: Shop) -> None:
    class Service:
        @shop.outbox.transactional
        async def place(self, number: int, session: AsyncSession) -> None:
            await shop.write(number, session)

    recorder = Recorder()
    serving = make_outbox(observers=[recorder])
    async with serving.running(listeners=[listen("order.wanted", queue="wanted")(Service().place)]):
        async with serving.transaction() as session:
            await serving.emit(session, "order.wanted", 1)
        await recorder.wait_for(Handled)
    await Service().place(2)
    assert await shop.kept(1, 2)


@on_sqlite
def test_a_web_framework_does_not_see_the_session(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, log=False)
    app = FastAPI()
    told: list[int] = []

    @app.post("/orders", status_code=201)
    @outbox.transactional
    async def place(order: Order, tenant: Annotated[str, Depends(tenant)], session: AsyncSession) -> dict[str, Any]:
        await outbox.emit(session, "order.placed", order.number)
        outbox.after_commit(session, lambda: told.append(order.number))
        if order.fails:
            raise Failure
        return {"tenant": tenant}

    @app.post("/now", status_code=201)
    @outbox.transactional
    def place_now(order: Order, session: Session) -> None:
        outbox.emit_sync(session, "order.placed", order.number)

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/orders", json={"number": 1})
        assert (answer.status_code, answer.json()) == (201, {"tenant": "acme"})
        assert client.post("/orders", json={"number": 2, "fails": True}).status_code == 500
        assert client.post("/now", json={"number": 3}).status_code == 201
        body = client.get("/openapi.json").json()["paths"]["/orders"]["post"]
        assert "parameters" not in body
    assert list(inspect.signature(place).parameters) == ["order", "tenant"]
    assert told == [1]

    async def stored() -> list[int]:
        found = [int(each.message.body) for each in await outbox.messages()]
        await outbox.close()
        return found

    assert asyncio.run(stored()) == [1, 3]


# Hooks


async def test_hooks_run_in_their_order_when_nothing_is_held_any_more(shop: Shop) -> None:
    told: list[str] = []

    async def tell(number: int) -> None:
        await shop.place(number)  # on SQLite nobody could, while the transaction lasts
        told.append(f"async {number}")

    async with shop.outbox.transaction() as session:
        await shop.write(1, session)
        shop.outbox.after_commit(session, lambda: told.append("first"))
        shop.outbox.after_commit(session, functools.partial(tell, 2))
        shop.outbox.after_commit(session, lambda: tell(3))
        shop.outbox.after_commit(session, lambda: told.append("last"))
        assert told == []
    assert told == ["first", "async 2", "async 3", "last"]
    assert await shop.kept(1, 2, 3)


async def test_a_hook_that_fails_is_told_and_stops_nobody(make_outbox: MakeOutbox) -> None:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    told: list[str] = []

    def fail() -> None:
        raise Failure

    async def fail_later() -> None:
        raise Failure

    async def wait_for_what_was_cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    async with outbox.transaction() as session:
        await outbox.emit(session, "order.placed", 1)
        outbox.after_commit(session, fail)
        outbox.after_commit(session, fail_later)
        outbox.after_commit(session, wait_for_what_was_cancelled)
        outbox.after_commit(session, lambda: told.append("still"))
    failed = recorder.of(HookFailed)
    assert [type(each.error) for each in failed] == [Failure, Failure, asyncio.CancelledError]
    assert [each.what.rpartition(".")[2] for each in failed] == ["fail", "fail_later", "wait_for_what_was_cancelled"]
    assert told == ["still"]
    assert len(await outbox.messages()) == 1


async def test_hooks_of_the_applications_own_sessions_run_too(
    outbox: Outbox, own_engine: AsyncEngine, database_url: str
) -> None:
    told: list[str] = []
    async with AsyncSession(own_engine) as session:
        await outbox.emit(session, "order.placed", 1)
        outbox.after_commit(session, lambda: told.append("rolled back"))
        await session.rollback()
        await outbox.emit(session, "order.placed", 2)
        outbox.after_commit(session, lambda: told.append("committed"))
        await session.commit()
        assert told == ["committed"]
        await session.commit()
        async with session.begin():
            outbox.after_commit(session, lambda: told.append("again"))
    engine = plain_engine(database_url)
    with Session(engine) as plain, plain.begin():
        outbox.after_commit(plain, lambda: told.append("plain"))
    registry = scoped_session(sessionmaker(engine))
    with registry.begin():
        outbox.after_commit(registry, lambda: told.append("registry"))
    registry.remove()
    engine.dispose()
    registered = async_scoped_session(async_sessionmaker(own_engine), asyncio.current_task)
    async with registered.begin():
        outbox.after_commit(registered, lambda: told.append("async registry"))
    await registered.remove()
    assert told == ["committed", "again", "plain", "registry", "async registry"]


async def test_a_savepoint_takes_its_hooks_with_it_and_no_others(outbox: Outbox, own_engine: AsyncEngine) -> None:
    told: list[str] = []

    def hook(name: str) -> None:
        outbox.after_commit(session, lambda: told.append(name))

    async with AsyncSession(own_engine) as session, session.begin():
        await outbox.emit(session, "order.placed", 1)
        hook("before")
        rolled_back = await session.begin_nested()
        hook("in a savepoint that is rolled back")
        async with session.begin_nested():
            hook("in a released savepoint of that one")
        await rolled_back.rollback()
        async with session.begin_nested():
            hook("released")
            open_to_the_end = await session.begin_nested()
            hook("open when the one around it was released")
            assert open_to_the_end.is_active
        hook("after")
        assert told == []
    assert told == ["before", "released", "open when the one around it was released", "after"]


async def test_nobody_awaits_a_hook_of_a_session_that_is_the_applications(
    make_outbox: MakeOutbox, own_engine: AsyncEngine
) -> None:
    async def tell() -> None: ...

    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    async with AsyncSession(own_engine) as session, session.begin():
        with pytest.raises(TransactionError, match=r"tell.* cannot be awaited .* transaction\(\)"):
            outbox.after_commit(session, tell)
        outbox.after_commit(session, lambda: tell())
    assert [type(each.error) for each in recorder.of(HookFailed)] == [TransactionError]


async def test_a_hook_needs_a_session_with_a_transaction(outbox: Outbox, own_engine: AsyncEngine) -> None:
    async with AsyncSession(own_engine) as session:
        with pytest.raises(TransactionError, match="begin one"):
            outbox.after_commit(session, print)
    async with own_engine.begin() as connection:
        with pytest.raises(TransactionError, match="behind the commit"):
            outbox.after_commit(connection, print)  # type: ignore[arg-type]
    with pytest.raises(TransactionError, match="AsyncSession"):
        outbox.after_commit("session", print)  # type: ignore[arg-type]


async def test_a_listeners_hook_runs_when_its_message_is_done(make_outbox: MakeOutbox) -> None:
    told: list[int] = []
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])

    @listen("order.placed", queue="mails", retry_delays=(0,))
    async def mail(number: int, session: AsyncSession, attempt_count: int) -> None:
        outbox.after_commit(session, lambda: told.append(attempt_count))
        if attempt_count == 1:
            raise Failure

    async with outbox.running(listeners=[mail]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.placed", 1)
        await recorder.wait_for(Handled, 2)
    assert told == [2]


# Warnings


@on_sqlite
async def test_a_savepoint_that_was_rolled_back_is_no_forgotten_commit(outbox: Outbox, own_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with AsyncSession(own_engine) as session:
            nested = await session.begin_nested()
            await outbox.emit(session, "order.placed", 1)
            await nested.rollback()
    with pytest.warns(NotAtomicWarning, match=r"1 emit\(s\).*session\.commit\(\)"):
        async with AsyncSession(own_engine) as session, session.begin_nested():
            await outbox.emit(session, "order.placed", 1)


@on_sqlite
async def test_what_was_received_in_a_savepoint_that_rolled_back_is_told_to_nobody(make_outbox: MakeOutbox) -> None:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    async with outbox.transaction() as session:
        for routing_key in ("taken.back", "kept"):
            nested = await session.begin_nested()
            message = Message(routing_key=routing_key, body=b"1")
            await outbox.receive(session, "orders", message, unwanted="wait")
            await (nested.rollback() if routing_key == "taken.back" else nested.commit())
        assert recorder.of(Received) == []
    assert len(recorder.of(Received)) == 1


@on_sqlite
async def test_sqlite_says_what_to_do_about_a_second_transaction_in_one_task(outbox: Outbox) -> None:
    async with outbox.transaction():
        with pytest.raises(TransactionError, match="pass its session on"):
            async with outbox.transaction():
                pass
