"""What somebody who tried to break the library managed to break, each once."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Table, insert, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, TransactionError, listen
from outbox.core.attempt import Done, RetryIn
from outbox.core.binding import Binding
from outbox.core.events import Handled, Troubled
from outbox.core.store import Selection, Suspected
from outbox.transports import function
from tests.support.databases import on_postgresql, on_sqlite
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.effects import made, numbers_table, written
from tests.walk.strategies import Watch


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Table:
    return await made(outbox, numbers_table(table_name))


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_listener_that_ends_its_own_transaction_repeats_no_effect(
    make_outbox: MakeOutbox, watch: Watch, effects: Table, end: str
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="async", retry_delays=(0, 0))
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(n=body))
        await getattr(session, end)()

    @listen("#", queue="plain", retry_delays=(0, 0))
    def in_thread(body: int, session: Session) -> None:
        session.execute(insert(effects).values(n=body))
        getattr(session, end)()

    await emit(outbox, 1)
    async with outbox.running(listeners=[in_loop, in_thread]):
        await watch.wait_for(Handled, 6)
    assert await written(outbox, effects) == []
    letters = await outbox.dead_letters.list()
    assert [letter.queue for letter in letters] == ["async", "plain"] or len(letters) == 2
    assert all(
        letter.error.startswith(f"TransactionError: the listener {end[:4]}") or end in letter.error
        for letter in letters
    )


async def test_a_savepoint_of_the_listeners_own_is_fine(make_outbox: MakeOutbox, watch: Watch, effects: Table) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        async with session.begin_nested():
            await session.execute(insert(effects).values(n=1))
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await session.execute(insert(effects).values(n=2))
                raise ZeroDivisionError

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled)
    assert await written(outbox, effects) == [1]


@on_postgresql
async def test_a_router_that_is_frozen_at_work_stops_nobody_else(make_outbox: MakeOutbox, watch: Watch) -> None:
    """A transaction that holds what a router holds: some messages, and the bindings' version."""
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    await outbox.store.queues.bind([listener.binding])
    await outbox.store.maintenance.record_transport("database")
    engine = create_async_engine(outbox.engines.asynchronous.url)
    async with engine.connect() as frozen:
        state = outbox.tables.state.name
        await frozen.execute(text(f"SELECT bindings_version FROM {state} WHERE id = 1 FOR SHARE"))
        async with outbox.running(listeners=[listener]):
            for n in range(5):
                await emit(outbox, n)
                await watch.wait_for(Handled, n + 1)
    await engine.dispose()


async def test_a_signal_reaches_every_server_of_a_process(make_outbox: MakeOutbox, table_name: str) -> None:
    first, second = make_outbox(), make_outbox(table_name=f"{table_name}_b")

    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    serving = [
        asyncio.create_task(first.worker([listener])),
        asyncio.create_task(first.message_relay()),
        asyncio.create_task(second.worker([listener])),
    ]
    async with asyncio.timeout(PATIENCE):
        while not (await first.bindings() and await second.bindings()):
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*serving)
    assert signal.getsignal(signal.SIGTERM) is before


async def test_leaving_one_running_block_leaves_another_alone(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])
    started, release, runs = asyncio.Event(), asyncio.Event(), 0

    @listen("a", queue="a")
    async def long(body: int) -> None:
        nonlocal runs
        runs += 1
        started.set()
        await release.wait()

    @listen("b", queue="b")
    async def other(body: int) -> None: ...

    await emit(outbox, 1, routing_key="a")
    async with outbox.running(listeners=[long]):
        await asyncio.wait_for(started.wait(), PATIENCE)
        async with outbox.running(listeners=[other]):
            await emit(outbox, 2, routing_key="b")
            await watch.wait_for(Handled)
        release.set()
        await watch.wait_for(Handled, 2)
    assert runs == 1


@on_postgresql
async def test_tables_made_in_the_callers_own_transaction_are_used(database_url: str, make_outbox: MakeOutbox) -> None:
    engine = create_async_engine(database_url)
    outbox = make_outbox(db_engine=engine)
    async with asyncio.timeout(PATIENCE), engine.begin() as connection:
        await connection.run_sync(outbox.metadata.create_all)
        await outbox.emit(connection, "a", 1)
    assert len(await outbox.messages()) == 1
    await engine.dispose()


async def test_workers_that_start_together_do_not_deadlock_over_what_waits_for_them(
    make_outbox: MakeOutbox,
) -> None:
    stores = [make_outbox().store for _ in range(4)]
    outbox = make_outbox()
    await emit(outbox, *range(2000), routing_key="lonely")
    while (await stores[0].queues.route(500, {})).taken:
        pass

    async def bind(number: int) -> None:
        for n in range(4):
            await stores[number].queues.bind([Binding(f"q{number}.{n}", f"nothing.{number}.{n}")])
            await stores[number].queues.route(500, {})

    await asyncio.gather(*map(bind, range(4)))
    assert (await outbox.backlog()).unroutable == 2000


@on_postgresql
async def test_a_pool_of_one_connection_is_enough(database_url: str, make_outbox: MakeOutbox, watch: Watch) -> None:
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0)
    outbox = make_outbox(db_engine=engine, observers=[watch])

    @listen("#", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    await emit(outbox, *range(20))
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 20)
    assert not watch.of(Troubled)
    await engine.dispose()


@on_postgresql
async def test_waiting_for_a_connection_burns_no_attempt(
    database_url: str, make_outbox: MakeOutbox, watch: Watch
) -> None:
    """The pool is empty for longer than the listener may take, and gives up before a connection comes."""
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.3)
    outbox = make_outbox(db_engine=engine, observers=[watch])
    runs = 0

    async def listener(body: int, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1

    await emit(outbox, 1)
    hurried = listen("#", queue="q", timeout=0.2, retry_delays=())(listener)
    async with engine.connect(), outbox.running(listeners=[hurried]):
        await watch.wait_for(Troubled)
        assert runs == 0
    async with outbox.running(listeners=[listen("#", queue="q", retry_delays=())(listener)]):
        await watch.wait_for(Handled, 1)
        async with asyncio.timeout(PATIENCE):
            while runs == 0:
                await asyncio.sleep(0.02)
    assert await outbox.dead_letters.list() == []
    await engine.dispose()


async def test_a_former_suspect_does_not_hold_up_the_healthy_of_its_queue(make_outbox: MakeOutbox) -> None:
    """It crashed once and failed once: the others are claimed without it."""
    outbox = make_outbox()
    store = outbox.store
    await store.queues.bind([Binding("q", "#")])
    await emit(outbox, "suspect")
    await store.queues.route(10, {})
    dead = store.feed.claim(Selection(limit=1, lease=timedelta(seconds=0.2), destination="q"))
    await dead.__aenter__()
    dead._renewal.cancel()  # type: ignore[attr-defined]
    await asyncio.sleep(0.25)
    async with store.feed.claim(Selection(limit=1, lease=timedelta(seconds=30), destination="q")) as claim:
        await claim.settle({claim.attempts[0].id: RetryIn(timedelta(0), "failed")})
    await emit(outbox, 1, 2, 3)
    await store.queues.route(10, {})
    async with store.feed.claim(
        Selection(limit=10, lease=timedelta(seconds=30), destination="q", suspected=Suspected.NONE)
    ) as healthy:
        assert sorted(attempt.message.body for attempt in healthy.attempts) == [b"1", b"2", b"3"]
        async with store.feed.claim(Selection(limit=10, lease=timedelta(seconds=30), destination="q")) as alone:
            [attempt] = alone.attempts
            assert (attempt.message.body, attempt.crash_count, attempt.attempt_count) == (b'"suspect"', 1, 2)
            await alone.settle({attempt.id: Done()})


@on_postgresql
async def test_other_event_loops_of_a_process_leave_no_connections_behind(
    database_url: str, make_outbox: MakeOutbox, table_name: str
) -> None:
    outbox = make_outbox()
    engine = create_async_engine(database_url)

    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    async def connections() -> int:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE :mine OR query LIKE 'LISTEN%'")
        async with engine.connect() as connection:
            return int(await connection.scalar(query, {"mine": f"%{table_name}%"}))

    def emit_elsewhere() -> None:
        async def once() -> None:
            other = create_async_engine(database_url)
            async with AsyncSession(other) as session, session.begin():
                await outbox.emit(session, "a", 1)
            await other.dispose()

        asyncio.run(once())

    async with outbox.running(listeners=[listener]):
        await asyncio.to_thread(emit_elsewhere)
        before = await connections()
        for _ in range(10):
            await asyncio.to_thread(emit_elsewhere)
        async with asyncio.timeout(PATIENCE):
            while await connections() > before + 2:  # the server takes its time to let go of those that left
                await asyncio.sleep(0.05)
    await engine.dispose()


async def test_one_message_that_hangs_does_not_hold_up_its_batch(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "CALLED_WITHIN", 0.1)
    sent: list[bytes] = []

    async def publish(message: Message) -> None:
        if message.body == b"0" and len(sent) < 4:
            await asyncio.sleep(3600)
        sent.append(message.body)

    outbox = make_outbox(transport=publish)
    await emit(outbox, *range(5))
    async with outbox.running(relay=True):
        async with asyncio.timeout(PATIENCE):
            while (await outbox.backlog()).waiting:
                await asyncio.sleep(0.02)
    assert sorted(sent) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_row_that_nobody_can_read_is_buried_and_stops_nobody(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    await emit(outbox, 1, 2, 3)
    messages = outbox.tables.messages
    async with outbox.transaction() as session:
        await session.execute(update(messages).where(messages.c.id == 2).values(headers="{not json"))
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 2)
        async with asyncio.timeout(PATIENCE):
            while not (await outbox.backlog()).dead:
                await asyncio.sleep(0.02)
    assert (await outbox.backlog()).dead == 1


@on_sqlite
async def test_sqlite_lets_everybody_of_a_process_write_in_turn(make_outbox: MakeOutbox, watch: Watch) -> None:
    """Listeners that write without a pause starve neither a producer nor the renewal of a lease."""
    outbox = make_outbox(observers=[watch], lease=10)
    runs, count, release = 0, 120, asyncio.Event()

    @listen("work", queue="q", timeout=5, concurrency=10)
    async def writes(body: int, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.05)

    @listen("hold", queue="held")
    async def holds(body: int) -> None:
        await release.wait()

    async def held_until() -> datetime | None:
        [stored] = await outbox.messages(queue="held")
        return stored.leased_until

    await emit(outbox, 0, routing_key="hold")
    async with outbox.running(listeners=[writes, holds]):
        async with asyncio.timeout(PATIENCE):
            while not await outbox.messages(queue="held") or (first := await held_until()) is None:
                await asyncio.sleep(0.02)
        await emit(outbox, *range(count), routing_key="work")
        for _ in range(6):
            before = runs
            await emit(outbox, 0, routing_key="aside")
            assert runs - before <= 2 * 10, "it waits for those that came before it, not for those that came later"
        async with asyncio.timeout(PATIENCE):
            while await held_until() == first:
                await asyncio.sleep(0.02)
        assert runs < count, "the lease is renewed while the others write"
        release.set()
        await watch.wait_for(Handled, count + 1)
    assert {type(event.outcome) for event in watch.of(Handled)} == {Done}


@on_sqlite
async def test_a_second_transaction_in_the_same_task_is_refused_instead_of_waiting_for_itself(
    outbox: Outbox,
) -> None:
    async with outbox.transaction():
        with pytest.raises(TransactionError, match="already"):
            async with outbox.transaction():
                pass
