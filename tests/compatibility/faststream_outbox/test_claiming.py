""" "Subscriber: two async loops" and "At-least-once delivery": how messages are claimed, handled and removed.

What the project calls max_workers, fetch_batch_size and max_fetch_interval are `concurrency`, `prefetch_count` and
`poll_interval` here; the worker routes as well, so no relay process is needed beside it.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from outbox import Binding, Message, Outbox, listen
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import Handled, Routed
from outbox.core.message import NOW
from outbox.core.store import Selection
from tests.support.databases import on_every_driver, on_postgresql, on_sqlite
from tests.support.observing import PATIENCE, Recorder, Statements, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox
from tests.support.program import program

LEASE = timedelta(seconds=30)


async def emit_range(outbox: Outbox, count: int, routing_key: str = "orders", **options: Any) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, routing_key, range(count), **options)


async def queued(outbox: Outbox, count: int) -> None:
    """Messages that lie in the queue `orders`."""
    await outbox.store.queues.bind([Binding("orders", "orders")])
    await emit_range(outbox, count)
    await outbox.store.queues.route(count, {})


def bodies(claim: Any) -> list[int]:
    return [int(attempt.message.body) for attempt in claim.attempts]


async def is_empty(outbox: Outbox) -> bool:
    return not await outbox.messages()


# The claim


async def test_a_claim_takes_due_messages_in_their_order_up_to_its_limit(outbox: Outbox) -> None:
    await queued(outbox, 5)
    async with outbox.store.feed.claim(Selection(limit=3, lease=LEASE, destination="orders")) as claim:
        assert bodies(claim) == [0, 1, 2]


async def test_what_one_claim_holds_no_other_gets(make_outbox: MakeOutbox) -> None:
    first, second = make_outbox(), make_outbox()
    await queued(first, 5)
    async with (
        first.store.feed.claim(Selection(limit=3, lease=LEASE, destination="orders")) as one,
        second.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as two,
        first.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as three,
    ):
        assert bodies(one) == [0, 1, 2]
        assert bodies(two) == [3, 4]
        assert bodies(three) == []


async def test_a_claim_takes_nothing_of_another_queue_and_nothing_that_is_not_due(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("orders", "orders"), Binding("others", "others")])
    await emit_range(outbox, 1, "others")
    await emit_range(outbox, 1, "orders", eta=timedelta(hours=1))
    await outbox.store.queues.route(10, {})
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        assert bodies(claim) == []


async def test_a_claim_hands_out_nothing_that_has_expired_and_buries_it(outbox: Outbox) -> None:
    await outbox.store.queues.bind([Binding("orders", "orders")])
    await emit_range(outbox, 2, eta=datetime.now(UTC) - timedelta(hours=1), expiration=1)
    await emit_range(outbox, 1, expiration=3600)
    await outbox.store.queues.route(10, {})
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        assert bodies(claim) == [0]
    letters = await outbox.dead_letters.list()
    assert [(letter.reason, letter.attempt_count, letter.crash_count) for letter in letters] == [("expired", 0, 0)] * 2


async def test_a_message_that_failed_is_not_claimed_before_its_next_attempt(outbox: Outbox) -> None:
    await queued(outbox, 2)
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        first, second = claim.attempts
        await claim.settle({first.id: RetryIn(timedelta(hours=1), "later"), second.id: RetryIn(timedelta(0), "now")})
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        assert bodies(claim) == [1]
        assert claim.attempts[0].attempt_count == 2


@on_every_driver
async def test_unleased_messages_and_expired_leases_are_claimed_by_the_same_ordinary_claim(
    make_outbox: MakeOutbox,
) -> None:
    dying, living = make_outbox(), make_outbox()
    await queued(dying, 1)
    async with dying.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as lost:
        async with living.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
            assert bodies(claim) == []
        await let_leases_run_out(living)
        async with living.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
            assert bodies(claim) == [0]
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
        assert bodies(lost) == [0]
    assert await is_empty(living)


async def test_what_is_not_settled_when_a_claim_closes_is_due_again_and_was_never_tried(outbox: Outbox) -> None:
    await queued(outbox, 2)
    for _ in range(5):
        async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
            assert [(a.attempt_count, a.crash_count) for a in claim.attempts] == [(1, 0), (1, 0)]


@on_postgresql
async def test_a_claim_passes_over_rows_that_somebody_has_locked(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await queued(outbox, 3)
    messages = outbox.tables.messages
    async with db_engine.begin() as other:
        await other.execute(select(messages.c.id).order_by(messages.c.id).limit(1).with_for_update())
        async with (
            asyncio.timeout(PATIENCE),
            outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim,
        ):
            assert bodies(claim) == [1, 2]


async def test_no_transaction_is_open_while_a_claim_is_held(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await queued(outbox, 1)
    messages = outbox.tables.messages
    async with (
        outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")),
        asyncio.timeout(PATIENCE),
        db_engine.begin() as other,
    ):
        await other.execute(messages.update().values(headers=None))


async def test_a_message_says_when_it_was_made_but_only_the_databases_clock_decides(outbox: Outbox) -> None:
    """A producer whose clock is a year ahead, or behind, delays and hurries nothing."""
    await outbox.store.queues.bind([Binding("orders", "orders")])
    for years in (1, -1):
        wrong = datetime.now(UTC) + timedelta(days=365 * years)
        message = Message(routing_key="orders", body=b"%d" % years, created_at=wrong)
        statement, rows = outbox.store.writing.insert([message], NOW)
        async with outbox.transaction() as session:
            connection = await session.connection()
            await connection.run_sync(outbox.store.writing.write, statement, rows)
    await outbox.store.queues.route(10, {})
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        assert bodies(claim) == [1, -1]


async def test_reading_what_is_unprocessed_takes_no_lease(outbox: Outbox) -> None:
    await queued(outbox, 2)
    assert [stored.state for stored in await outbox.messages(queue="orders")] == ["queued"] * 2
    assert (await outbox.backlog()).leased == 0
    async with outbox.store.feed.claim(Selection(limit=10, lease=LEASE, destination="orders")) as claim:
        assert [stored.leased_until is not None for stored in await outbox.messages()] == [True, True]
        assert bodies(claim) == [0, 1]


# The worker


async def test_a_row_is_removed_only_after_its_listener_has_succeeded(outbox: Outbox, recorder: Recorder) -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        await started.put(number)
        await finish.wait()

    async with outbox.running(listeners=[orders]):
        await emit_range(outbox, 1)
        await arrival(started)
        [stored] = await outbox.messages()
        assert (stored.state, stored.attempt_count) == ("queued", 0)
        assert stored.leased_until is not None
        finish.set()
        await recorder.wait_for(Handled)
        assert await is_empty(outbox)


async def test_no_relay_process_is_needed_and_one_may_run_all_the_same(make_outbox: MakeOutbox) -> None:
    recorder = Recorder()
    relay, worker = make_outbox(observers=[recorder]), make_outbox()
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        await arrivals.put(number)

    async with worker.running(listeners=[orders]):
        await emit_range(worker, 3)
        assert {await arrival(arrivals) for _ in range(3)} == {0, 1, 2}
    async with relay.running(relay=True):
        await emit_range(relay, 3)
        await eventually(lambda: sum(event.count for event in recorder.of(Routed)) == 3)
        async with worker.running(listeners=[orders]):
            assert {await arrival(arrivals) for _ in range(3)} == {0, 1, 2}
    assert arrivals.empty()


@pytest.mark.parametrize("concurrency", [1, 4])
@on_sqlite
async def test_a_worker_runs_as_many_listeners_at_a_time_as_it_may(
    outbox: Outbox, recorder: Recorder, concurrency: int
) -> None:
    running: set[int] = set()
    most = 0
    all_at_work = asyncio.Barrier(concurrency)

    @listen("orders", queue="orders", concurrency=concurrency)
    async def orders(number: int) -> None:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        await all_at_work.wait()
        running.remove(number)

    async with outbox.running(listeners=[orders]):
        await emit_range(outbox, 20)
        await recorder.wait_for(Handled, 20)
    assert most == concurrency


@on_sqlite
async def test_one_worker_with_one_slot_keeps_the_order_of_emission(outbox: Outbox, recorder: Recorder) -> None:
    seen: list[int] = []

    @listen("orders", queue="orders", concurrency=1)
    async def orders(number: int) -> None:
        seen.append(number)

    for number in range(10):
        async with outbox.transaction() as session:
            await outbox.emit(session, "orders", number)
    async with outbox.running(listeners=[orders]):
        await recorder.wait_for(Handled, 10)
    assert seen == list(range(10))


@on_sqlite
async def test_a_worker_holds_no_more_than_its_prefetch_count(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(prefetch_count=6)
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("orders", queue="orders", concurrency=2)
    async def orders(number: int) -> None:
        await started.put(number)
        await finish.wait()

    await queued(outbox, 50)
    async with outbox.running(listeners=[orders]):
        await arrival(started)
        await arrival(started)
        for _ in range(20):
            assert ((await outbox.backlog()).leased or 0) <= 6
        finish.set()
        await eventually(lambda: is_empty(outbox))


@on_sqlite
async def test_a_worker_that_is_stuck_leaves_the_rest_to_an_idle_one(make_outbox: MakeOutbox) -> None:
    """`prefetch_count` says that a worker takes many messages only while it handles them quickly."""
    stuck, idle = make_outbox(), make_outbox()
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()
    handled: set[int] = set()

    @listen("orders", queue="orders", concurrency=5)
    async def hangs(number: int) -> None:
        await started.put(number)
        await finish.wait()

    @listen("orders", queue="orders")
    async def handles(number: int) -> None:
        handled.add(number)

    await queued(stuck, 50)
    async with stuck.running(listeners=[hangs]):
        for _ in range(5):
            await arrival(started)
        async with idle.running(listeners=[handles]):
            # Five run in the stuck worker, and about as many may be ready there to follow them.
            await eventually(lambda: len(handled) >= 40)
            finish.set()
            await eventually(lambda: is_empty(idle))


async def test_claims_and_settlements_come_in_batches(outbox: Outbox, recorder: Recorder) -> None:
    @listen("orders", queue="orders", concurrency=10)
    async def orders(number: int) -> None: ...

    await queued(outbox, 300)
    with Statements() as statements:
        async with outbox.running(listeners=[orders]):
            await recorder.wait_for(Handled, 300)
    name = outbox.tables.messages.name
    removals = [text for text in statements if text.startswith(f"DELETE FROM {name} ")]
    claims = [text for text in statements if "lease_token" in text and "starts" in text]
    assert 1 <= len(removals) <= 100
    assert 1 <= len(claims) <= 100


async def test_several_workers_share_a_queue_without_handling_anything_twice(make_outbox: MakeOutbox) -> None:
    outboxes = [make_outbox() for _ in range(3)]
    handled: Counter[int] = Counter()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        handled[number] += 1

    async with (
        outboxes[0].running(listeners=[orders]),
        outboxes[1].running(listeners=[orders]),
        outboxes[2].running(listeners=[orders]),
    ):
        await emit_range(outboxes[0], 300)
        await eventually(lambda: len(handled) == 300)
        await eventually(lambda: is_empty(outboxes[0]))
    assert set(handled.values()) == {1}


@on_sqlite
async def test_one_worker_serves_several_queues_and_a_stuck_one_holds_up_no_other(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[int] = asyncio.Queue()
    stuck, release = asyncio.Event(), asyncio.Event()

    @listen("orders", queue="stuck", concurrency=1)
    async def hangs(number: int) -> None:
        stuck.set()
        await release.wait()

    @listen("orders", queue="flows")
    async def flows(number: int) -> None:
        await arrivals.put(number)

    async with outbox.running(listeners=[hangs, flows]):
        await emit_range(outbox, 10)
        await asyncio.wait_for(stuck.wait(), PATIENCE)
        assert {await arrival(arrivals) for _ in range(10)} == set(range(10))
        release.set()


async def test_a_message_of_a_producer_that_wakes_nobody_is_found_by_polling(
    make_outbox: MakeOutbox, sync_engine: Engine
) -> None:
    """Code without an event loop, where no thread may send a wake-up."""
    outbox = make_outbox()
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        await arrivals.put(number)

    def produce() -> None:
        producer = Outbox(db_engine=sync_engine, table_name=outbox.tables.messages.name, sync_wakeups=False)
        with Session(sync_engine) as session, session.begin():
            producer.emit_sync(session, "orders", 7)

    async with outbox.running(listeners=[orders]):
        await asyncio.to_thread(produce)
        assert await arrival(arrivals) == 7


@on_postgresql
async def test_a_worker_outlives_the_loss_of_all_its_connections(
    make_outbox: MakeOutbox, database_url: str, table_name: str, db_engine: AsyncEngine
) -> None:
    named: dict[str, Any] = {"application_name": table_name}
    options = {"server_settings": named} if "asyncpg" in database_url else named
    engine = create_async_engine(database_url, connect_args=options)
    consumer, producer = make_outbox(db_engine=engine), make_outbox()
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(number: int) -> None:
        await arrivals.put(number)

    async with consumer.running(listeners=[orders]):
        await emit_range(producer, 1)
        assert await arrival(arrivals) == 0
        async with db_engine.begin() as connection:
            kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
            assert (await connection.execute(text(kill), {"name": table_name})).all()
        async with producer.transaction() as session:
            await producer.emit(session, "orders", 7)
        assert await arrival(arrivals) == 7
    await engine.dispose()


# At least once


DIES = """
    import asyncio
    import os
    import sys

    from outbox import listen, outbox, setup, worker
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession

    database_url, table_name, when = sys.argv[1:]
    setup(db_engine_url=database_url, table_name=table_name, poll_interval=0.1)


    async def leave_an_effect(session):
        values = {"id": int(when == "inside"), "username": when}
        await session.execute(text(f"INSERT INTO {table_name}_users (id, username) VALUES (:id, :username)"), values)


    async def before(number: int):
        os._exit(3)


    async def after(number: int):
        async with outbox.transaction() as session:
            await leave_an_effect(session)
        os._exit(3)


    async def inside(number: int, session: AsyncSession):
        await leave_an_effect(session)
        os._exit(3)


    asyncio.run(worker([listen("orders", queue=when)(globals()[when])]))
"""


async def test_a_worker_that_dies_in_its_listener_leaves_the_message_to_another(
    make_outbox: MakeOutbox, database_url: str, table_name: str, user_model: Any
) -> None:
    """Before its effect, after it, and inside of the transaction that is tied to the delivery."""
    outbox = make_outbox()
    moments = ("before", "after", "inside")
    await outbox.store.queues.bind([Binding(moment, "orders") for moment in moments])
    await emit_range(outbox, 1)
    async with AsyncExitStack() as stack:
        arguments = (DIES, database_url, table_name)
        dying = [await stack.enter_async_context(program(*arguments, moment)) for moment in moments]
        assert [await process.end() for process in dying] == [(3, "", "")] * 3
    async with outbox.transaction() as session:
        assert list(await session.scalars(select(user_model.username))) == ["after"]
    await let_leases_run_out(outbox)
    arrivals: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def listener(queue: str) -> Any:
        async def callback(number: int, attempt_count: int) -> None:
            await arrivals.put((queue, attempt_count))

        return listen("orders", queue=queue)(callback)

    async with outbox.running(listeners=[listener(moment) for moment in moments]):
        assert {await arrival(arrivals) for _ in moments} == {("before", 1), ("after", 1), ("inside", 1)}
        await eventually(lambda: is_empty(outbox))


RACER = """
    import asyncio
    import sys

    from outbox import listen, setup, worker

    setup(db_engine_url=sys.argv[1], table_name=sys.argv[2], poll_interval=0.1)


    @listen("orders", queue="orders")
    async def orders(number: int):
        print(number)


    print("ready")
    asyncio.run(worker([orders]))
"""


async def test_two_processes_race_and_handle_every_message_once(
    outbox: Outbox, database_url: str, table_name: str
) -> None:
    arguments = (RACER, database_url, table_name)
    async with program(*arguments) as first, program(*arguments) as second:
        assert [await first.says(), await second.says()] == ["ready", "ready"]
        await emit_range(outbox, 400)
        await eventually(lambda: is_empty(outbox))
        first.signal(signal.SIGTERM)
        second.signal(signal.SIGTERM)
        (code, one, complaints), (other_code, two, other_complaints) = await first.end(), await second.end()
    assert (code, other_code, complaints, other_complaints) == (0, 0, "", "")
    assert sorted(int(number) for number in (one + two).split()) == list(range(400))
