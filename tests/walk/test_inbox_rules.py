"""What makes effects happen once: copies at the same moment, COMMIT without an answer, and messages that are old."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Table, event, func, insert, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import NEVER, Listener, Message, Outbox, Reason, listen
from outbox.core.attempt import Dead, Done, Released
from outbox.core.events import CleanedUp, Handled
from outbox.outbound import cleanup
from outbox.outbound.cleanup import Cleanup
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.proxy import Link, Proxy

from .effects import made, numbers_table, written

COPIES = 10
MONTH = timedelta(days=30)


@pytest.fixture
def effects(table_name: str) -> Table:
    """Rows that listeners write, without a unique constraint."""
    return numbers_table(table_name)


async def make_table(outbox: Outbox, effects: Table) -> None:
    await outbox.create_tables()
    await made(outbox, effects)


def writing(effects: Table, batch: int | None) -> Listener:
    """A listener that writes numbers, one by one or as lists."""

    async def one(number: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(n=number))

    async def many(numbers: list[int], session: AsyncSession) -> None:
        await session.execute(insert(effects), [{"n": number} for number in numbers])

    return Listener("#", one if batch is None else many, queue="q", batch=batch)


def order(number: int, **fields: Any) -> Message:
    return Message(routing_key="order.created", body=str(number).encode(), **fields)


# Copies at the same moment.


@asynccontextmanager
async def two_workers(
    make_outbox: MakeOutbox, transport: str, listener: Listener, recorder: Recorder
) -> AsyncIterator[Outbox]:
    """Two instances on one database, and on the same queues."""
    async with AsyncExitStack() as stack:
        first = make_outbox(transport=transport, observers=[recorder])
        second = make_outbox(transport=first.transport if transport == "memory://" else transport, observers=[recorder])
        for outbox in (first, second):
            await stack.enter_async_context(outbox.running(listeners=[listener]))
        yield first


@pytest.mark.parametrize("transport", ["memory", "rabbitmq"])
@pytest.mark.parametrize("batch", [None, 4])
async def test_of_copies_that_are_handled_at_once_one_commits_and_the_others_skip(
    make_outbox: MakeOutbox,
    effects: Table,
    recorder: Recorder,
    transport: str,
    batch: int | None,
    request: pytest.FixtureRequest,
) -> None:
    url = "memory://" if transport == "memory" else request.getfixturevalue("rabbitmq_url")
    maker = make_outbox()
    await make_table(maker, effects)

    async def one(number: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(n=number))

    async def many(numbers: list[int], session: AsyncSession) -> None:
        await session.execute(insert(effects), [{"n": number} for number in numbers])

    listener = Listener("#", one if batch is None else many, queue="q", batch=batch, concurrency=COPIES)
    async with two_workers(make_outbox, url, listener, recorder) as outbox:
        messages = [order(number) for number in range(5)]
        for _ in range(COPIES):  # a publish takes each id once
            await outbox.transport.publish(messages)
        ended = await recorder.wait_for(Handled, COPIES * len(messages))
    assert all(isinstance(event.outcome, Done) for event in ended)
    assert await written(maker, effects) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)
async def test_a_copy_that_waits_for_another_for_longer_than_its_timeout_uses_up_no_attempt(
    make_outbox: MakeOutbox, effects: Table, recorder: Recorder
) -> None:
    outbox = make_outbox(transport="memory://", observers=[recorder])
    await make_table(outbox, effects)

    @listen("#", queue="q", timeout=timedelta(seconds=0.3), retry_delays=())
    async def listener(number: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(n=number))

    message = order(1)
    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:  # another worker's, which rolls back in the end
            connection = await session.connection()
            await connection.run_sync(
                lambda plain: outbox.store.writing.write(plain, *outbox.store.inbox.remember("q", message.id))
            )
            await outbox.transport.publish([message])
            [released] = await recorder.wait_for(Handled, 1)
            await session.rollback()
        ended = await recorder.wait_for(Handled, 2)
    assert (released.outcome, ended[-1].outcome) == (Released(), Done())
    assert ended[-1].attempt.attempt_count == 1
    assert await written(outbox, effects) == [1]


# COMMIT without an answer.


@pytest.fixture
def link(postgresql_url: str) -> Iterator[Link]:
    with Proxy() as proxy:
        yield proxy.link("worker", make_url(postgresql_url).port or 5432)


@pytest.fixture(params=["asyncpg", "psycopg"])
def url_by_proxy(request: pytest.FixtureRequest, postgresql_url: str, link: Link) -> str:
    """A connection whose answer to COMMIT can be cut off."""
    url = make_url(postgresql_url).set(drivername=f"postgresql+{request.param}", host="127.0.0.1", port=link.port)
    return url.render_as_string(hide_password=False)


@asynccontextmanager
async def behind(url: str, table_name: str, effects: Table, **options: Any) -> AsyncIterator[Outbox]:
    outbox = Outbox(db_engine_url=url, table_name=table_name, poll_interval=3600, **options)
    try:
        await make_table(outbox, effects)
        yield outbox
    finally:
        await outbox.close()


@pytest.fixture
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody commits but the listener: a worker cleans up as soon as it starts."""

    async def nothing(self: Cleanup) -> int:
        return 0

    monkeypatch.setattr(Cleanup, "round", nothing)


@pytest.mark.usefixtures("one_commit")
@pytest.mark.parametrize("kind", ["async", "plain", "list"])
async def test_a_commit_without_an_answer_is_not_acknowledged_and_its_copy_finds_the_entry(
    url_by_proxy: str, table_name: str, effects: Table, recorder: Recorder, link: Link, kind: str
) -> None:
    calls: list[Any] = []

    async def asynchronous(number: int, session: AsyncSession) -> None:
        calls.append(number)
        await session.execute(insert(effects).values(n=number))
        link.trip_at(["COMMIT"])

    def plain(number: int, session: Session) -> None:
        calls.append(number)
        session.execute(insert(effects).values(n=number))
        link.trip_at(["COMMIT"])

    async def a_list(numbers: list[int], session: AsyncSession) -> None:
        calls.extend(numbers)
        await session.execute(insert(effects), [{"n": number} for number in numbers])
        link.trip_at(["COMMIT"])

    callback: Any = {"async": asynchronous, "plain": plain, "list": a_list}[kind]
    listener = Listener("#", callback, queue="q", retry_delays=(), batch=10 if kind == "list" else None)
    async with behind(url_by_proxy, table_name, effects, transport="memory://", observers=[recorder]) as outbox:
        await outbox.transport.declare([listener])
        await outbox.transport.publish([order(1)])
        async with outbox.running(listeners=[listener]):
            await eventually(lambda: [each for each in recorder.of(Handled) if isinstance(each.outcome, Done | Dead)])
        assert link.tripped.is_set()
        assert calls == [1]
        assert [type(event.outcome) for event in recorder.of(Handled)] == [Released, Done]
        assert await outbox.dead_letters.list() == []
        assert await written(outbox, effects) == [1]


@pytest.mark.usefixtures("one_commit")
async def test_a_commit_without_an_answer_on_the_database_counts_once(
    url_by_proxy: str, table_name: str, effects: Table, recorder: Recorder, link: Link
) -> None:
    calls: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(number: int, session: AsyncSession) -> None:
        calls.append(number)
        await session.execute(insert(effects).values(n=number))
        link.trip_at(["COMMIT"])

    async with behind(url_by_proxy, table_name, effects, observers=[recorder]) as outbox:
        await outbox.transport.declare([listener])
        await outbox.transport.publish([order(1)])
        async with outbox.running(listeners=[listener]):
            await eventually(link.tripped.is_set)
            await eventually(lambda: _nothing_left(outbox))
        assert calls == [1]
        assert await outbox.dead_letters.list() == []
        assert await written(outbox, effects) == [1]


async def _nothing_left(outbox: Outbox) -> bool:
    return not await outbox.messages()


# Messages that are older than the inbox.


@pytest.fixture(params=["memory", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str:
    url: str = "memory://" if request.param == "memory" else request.getfixturevalue("rabbitmq_url")
    return url


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_message_that_is_older_than_the_inbox_is_dead_until_it_is_replayed(
    make_outbox: MakeOutbox, effects: Table, recorder: Recorder, broker: str, batch: int | None
) -> None:
    outbox = make_outbox(transport=broker, observers=[recorder])
    await make_table(outbox, effects)
    listener = writing(effects, batch)
    now = datetime.now(UTC)
    async with outbox.running(listeners=[listener]):
        await outbox.transport.publish(
            [
                order(1),
                order(2, created_at=now - MONTH + timedelta(days=1)),
                order(3, created_at=now - MONTH - timedelta(days=1)),
                order(4, created_at=now - 2 * MONTH, due_at=now - timedelta(days=1)),
            ]
        )
        ended = await recorder.wait_for(Handled, 4)
        [dead] = [event for event in ended if isinstance(event.outcome, Dead)]
        assert (dead.attempt.message.body, dead.outcome.reason) == (b"3", Reason.EXPIRED)  # type: ignore[union-attr]
        [letter] = await outbox.dead_letters.list(queue="q")
        assert "inbox_retention=30d" in letter.error
        assert await written(outbox, effects) == [1, 2, 4]
        assert await outbox.dead_letters.replay([letter.id]) == 1
        await recorder.wait_for(Handled, 5)
    assert await written(outbox, effects) == [1, 2, 3, 4]


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_message_whose_id_cannot_be_entered_is_dead_and_spoils_no_other(
    make_outbox: MakeOutbox, effects: Table, recorder: Recorder, broker: str, batch: int | None
) -> None:
    outbox = make_outbox(transport=broker, observers=[recorder])
    await make_table(outbox, effects)
    listener = writing(effects, batch)
    async with outbox.running(listeners=[listener]):
        await outbox.transport.publish([order(1), order(2, tracking_ids=("a NUL: \x00",)), order(3)])
        await recorder.wait_for(Handled, 3)
        [letter] = await outbox.dead_letters.list(queue="q")
    assert (letter.message.body, letter.reason, letter.attempt_count) == (b"2", Reason.UNDECODABLE, 1)
    assert "a message id must not contain control characters" in letter.error
    assert await written(outbox, effects) == [1, 3]


async def test_what_needs_no_inbox_may_be_of_any_age(
    make_outbox: MakeOutbox, effects: Table, recorder: Recorder
) -> None:
    old = order(1, created_at=datetime.now(UTC) - 2 * MONTH)

    @listen("#", queue="q")
    async def with_a_session(number: int, session: AsyncSession) -> None: ...

    @listen("#", queue="q")
    async def without(number: int) -> None: ...

    for options, listener in (
        ({}, with_a_session),  # the database is the transport: there is no entry that could be forgotten
        ({"transport": "memory://"}, without),
        ({"transport": "memory://", "inbox_retention": NEVER}, with_a_session),
    ):
        outbox = make_outbox(observers=[recorder], table_name=f"{effects.name}_{len(recorder.of(Handled))}", **options)
        await make_table(outbox, effects)
        await outbox.transport.declare([listener])
        await outbox.transport.publish([old])
        before = len(recorder.of(Handled))
        async with outbox.running(listeners=[listener]):
            ended = await recorder.wait_for(Handled, before + 1)
        assert isinstance(ended[-1].outcome, Done)


async def test_a_timer_that_waited_for_longer_than_the_inbox_keeps_is_not_old(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(transport="memory://", observers=[recorder])
    handled: list[int] = []

    @listen("#", queue="q")
    async def listener(number: int, session: AsyncSession) -> None:
        handled.append(number)

    await outbox.create_tables()
    await outbox.transport.declare([listener])
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.due", 1)
        messages = outbox.tables.messages
        await session.execute(
            messages.update().values(created_at=datetime.now(UTC) - 2 * MONTH)  # it was emitted with an eta
        )
    async with outbox.running(relay=True, listeners=[listener]):
        await recorder.wait_for(Handled)
    assert handled == [1]


# Forgetting.


async def test_the_inbox_forgets_in_bounded_batches(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(transport="memory://")
    await outbox.create_tables()
    inbox = outbox.tables.inbox
    long_ago = datetime.now(UTC) - 2 * MONTH
    rows = [{"queue": "q", "message_id": str(n), "entered_at": long_ago} for n in range(2 * cleanup.BATCH + 1)]
    rows.append({"queue": "q", "message_id": "young", "entered_at": datetime.now(UTC)})
    async with outbox.transaction() as session:
        await session.execute(insert(inbox), rows)
    cleaning = Cleanup(outbox.store, clean_up_after=NEVER, inbox_retention=MONTH, observe=recorder)
    while await cleaning.round():
        pass
    assert [event.count for event in recorder.of(CleanedUp)] == [cleanup.BATCH, cleanup.BATCH, 1]
    async with outbox.transaction() as session:
        assert list(await session.scalars(select(inbox.c.message_id))) == ["young"]


async def test_forgetting_reads_no_more_entries_than_it_deletes(postgresql_url: str, table_name: str) -> None:
    """By an index in the order of age: with a hundred thousand young entries a look costs what it costs with none."""
    url = postgresql_url.replace("postgresql://", "postgresql+psycopg://", 1)
    outbox = Outbox(db_engine_url=url, table_name=table_name)
    await outbox.create_tables()
    inbox, plans = outbox.tables.inbox, list[str]()
    async with outbox.transaction() as session:
        await session.execute(
            text(
                f"INSERT INTO {inbox.name} SELECT 'q', n::text, now() - CASE WHEN n <= 500 THEN interval '60 days' "
                "ELSE interval '1 day' END FROM generate_series(1, 100000) AS n"
            )
        )
    async with outbox.engines.asynchronous.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text(f"VACUUM ANALYZE {inbox.name}"))

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "DELETE")) and inbox.name in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))

    store: Any = outbox.store
    engine = (await store.runner.own()).transactions.sync_engine
    event.listen(engine, "before_cursor_execute", explain)
    try:
        assert await outbox.store.inbox.purge(MONTH, 100) == 100
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    chosen, deleted = plans
    assert f"{inbox.name}_entered" in chosen, chosen
    assert f"{inbox.name}_pkey" in deleted, deleted
    assert "Seq Scan" not in chosen + deleted
    async with outbox.transaction() as session:
        assert await session.scalar(select(func.count()).select_from(inbox)) == 99_900
    await outbox.close()
