"""Whatever is awaited may be cancelled wherever it waits: nothing is lost or left open, and the next call works."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Binding, Message, Outbox
from outbox.core.attempt import Done, RetryIn
from outbox.core.dead_letter import DeadLetters, Filter
from outbox.core.store import (
    CallerTransactions,
    CircuitTable,
    InboxTable,
    Inspection,
    Maintenance,
    OwnersTable,
    QueueClaim,
    QueueFeed,
    Queues,
    Selection,
    Store,
    Wanted,
    Writing,
)
from outbox.core.transport import Transport
from outbox.shutdown import Shutdown
from tests.support.databases import DATABASES
from tests.support.interrupting import Interrupted, interrupted
from tests.support.observing import PATIENCE

from .cutting import HOUR, LEASE, Sight, Stage, attempt_ids, connections_taken

# From Python 3.13 on, sqlite3 warns of a connection that is collected before it is closed. aiosqlite drops the one that
# its thread was opening when the connect was cancelled; the collection closes it at once.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed database in <sqlite3.Connection:ResourceWarning")

MOST_SUSPENSIONS = 200
ROLES = (
    *(Writing, CallerTransactions, QueueFeed, Queues, InboxTable, CircuitTable, OwnersTable, Inspection, Maintenance),
    *(DeadLetters, QueueClaim),
)
OWNERS = (Outbox, Store, *ROLES, Transport)

Operation = Callable[[Stage], Coroutine[Any, Any, object]]


@dataclass(frozen=True)
class Case:
    """Something to cut short."""

    name: str  # of what is awaited
    operation: Operation
    warm: bool = False  # on an outbox that was used before
    serves: bool = False  # it works on several things at its own pace

    def __str__(self) -> str:
        return f"{self.name}-{self.operation.__name__.strip('<>')}{'-warm' if self.warm else ''}"


CASES: list[Case] = []


def case(name: str, *, warm: bool = False, serves: bool = False) -> Callable[[Operation], Operation]:
    def add(operation: Operation) -> Operation:
        CASES.append(Case(name, operation, warm, serves))
        return operation

    return add


# Emitting. What comes before an outbox's first emit is cut by `emit`.


@case("Outbox.transaction")
async def a_transaction(stage: Stage) -> None:
    async with stage.outbox.transaction() as session:
        await stage.write_effect(session, "new")


@case("Outbox.emit")
async def emit(stage: Stage) -> None:
    async with stage.outbox.transaction() as session:
        await stage.write_effect(session, "new")
        await stage.outbox.emit(session, "order.paid", "new")


@case("Outbox.emit", warm=True)
async def emit_in_a_session_of_the_applications_own(stage: Stage) -> None:
    async with AsyncSession(stage.engine) as session, session.begin():
        await stage.outbox.emit(session, "order.paid", "new")
        await stage.write_effect(session, "new")


@case("Outbox.emit", warm=True)
async def emit_on_a_connection_and_in_a_savepoint(stage: Stage) -> None:
    async with stage.engine.begin() as connection, connection.begin_nested():
        await stage.outbox.emit(connection, "order.paid", "new", eta=HOUR, timer_id="new")


@case("Outbox.emit_many", warm=True)
async def emit_many(stage: Stage) -> None:
    async with stage.outbox.transaction() as session:
        await stage.outbox.emit_many(session, "order.paid", ["new", "newer", "newest"])
        await stage.write_effect(session, "new")


@case("Outbox.cancel_timer", warm=True)
async def cancel_timer(stage: Stage) -> None:
    async with stage.outbox.transaction() as session:
        await stage.outbox.cancel_timer(session, "timer")
        await stage.write_effect(session, "cancelled")


@case("Outbox.receive", warm=True)
async def receive(stage: Stage) -> None:
    await stage.outbox.receive("q", Message(routing_key="order.paid", body=b'"new"'))


@case("Outbox.receive", warm=True)
async def receive_in_a_transaction_for_a_queue_that_nobody_has(stage: Stage) -> None:
    async with stage.outbox.transaction() as session:
        await stage.write_effect(session, "new")
        await stage.outbox.receive(session, "nobodys", Message(routing_key="order.paid", body=b'"new"'))


# Serving.


@asynccontextmanager
async def ended_after(condition: Awaitable[None], end: Callable[[], object]) -> AsyncIterator[None]:
    """End what goes on in this block once the condition holds."""

    async def watch() -> None:
        await condition
        end()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


def terminate() -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # somebody heeds it
        os.kill(os.getpid(), signal.SIGTERM)


@case("Outbox.message_relay", serves=True)
async def message_relay(stage: Stage) -> None:
    async with ended_after(stage.routed(), terminate):
        await stage.outbox.message_relay()


@case("Outbox.worker", serves=True)
async def worker(stage: Stage) -> None:
    async with ended_after(stage.handled("first", "second", "waiting"), terminate):
        await stage.outbox.worker([stage.listener])


@case("Outbox.running", serves=True)
async def running(stage: Stage) -> None:
    handled = asyncio.Event()
    serving = stage.outbox.running(relay=True, listeners=[stage.listener])
    async with ended_after(stage.handled("first"), handled.set), serving:
        await handled.wait()


@case("Outbox.run", serves=True)
async def run(stage: Stage) -> None:
    shutdown = Shutdown()
    async with ended_after(stage.handled("first", "second", "waiting"), shutdown.begun.set):
        await stage.outbox.run(shutdown, listeners=[stage.listener])


@case("Transport.open", serves=True)
@case("Transport.consume", serves=True, warm=True)
async def consume(stage: Stage) -> None:
    transport = stage.outbox.transport
    await transport.open()
    deliveries: Any = transport.consume(stage.listener, 10)
    try:
        delivery = await anext(deliveries)
        await delivery.settle(RetryIn(HOUR, "not now"))
    finally:
        try:
            await deliveries.aclose()
        finally:
            await transport.close()


@case("Transport.close", serves=True)
async def leave_a_delivery_unsettled(stage: Stage) -> None:
    transport = stage.outbox.transport
    deliveries: Any = transport.consume(stage.listener, 10)
    try:
        await anext(deliveries)
    finally:
        try:
            await deliveries.aclose()
        finally:
            await transport.close()


@case("Transport.publish")
async def publish(stage: Stage) -> None:
    await stage.outbox.transport.publish([Message(routing_key="order.paid", body=b'"new"')])


@case("Transport.declare")
async def declare(stage: Stage) -> None:
    await stage.outbox.transport.declare([stage.listener])


@case("Transport.watched", warm=True)
async def watched(stage: Stage) -> None:
    async with stage.outbox.transport.watched() as health:
        if health is not None:  # the database's transport has none of its own
            await health()


@case("Transport.server_version", warm=True)
async def server_version(stage: Stage) -> None:
    await stage.outbox.transport.server_version()


# Claiming.


@case("QueueFeed.claim")
@case("QueueFeed.claim", warm=True)
async def claim(stage: Stage) -> None:
    async with stage.store.feed.claim(Selection(limit=10, lease=LEASE, destination="q")):
        await asyncio.sleep(0)


@case("Queues.route")
@case("Queues.route", warm=True)
async def route(stage: Stage) -> None:
    """What comes with a claim is given back when the claim closes, and when nobody gets it."""
    routing = await stage.store.queues.route(10, {}, {"q": Wanted(10, LEASE)})
    async with routing.claims["q"] as claim:
        assert set(attempt_ids(claim)) == {"first", "second", "waiting"}


@case("QueueClaim.settle", warm=True)
async def settle(stage: Stage) -> None:
    async with stage.store.feed.claim(Selection(limit=10, lease=LEASE, destination="q")) as claim:
        ids = attempt_ids(claim)
        await claim.settle({ids["first"]: Done(), ids["second"]: RetryIn(HOUR, "not now")})


@case("QueueClaim.start", warm=True)
async def start(stage: Stage) -> None:
    async with stage.store.feed.claim(Selection(limit=10, lease=LEASE, destination="q", isolated_at=0)) as claim:
        for attempt in claim.attempts:
            assert await claim.start(attempt)


@case("QueueClaim.renew_once", warm=True)
async def renew_once(stage: Stage) -> None:
    async with stage.store.feed.claim(Selection(limit=10, lease=LEASE, destination="q")) as claim:
        await claim.renew_once([attempt.id for attempt in claim.attempts], 2 * LEASE)


@case("QueueFeed.wait", warm=True)
async def wait(stage: Stage) -> None:
    await stage.store.feed.wait(0.3, destination="empty")


@case("CallerTransactions.turn")
async def turn_after_somebody_else(stage: Stage) -> None:
    taken, given_up = asyncio.Event(), asyncio.Event()

    async def somebody_else() -> None:
        async with stage.store.transactions.turn():
            taken.set()
            await given_up.wait()

    other = asyncio.create_task(somebody_else())
    try:
        await taken.wait()
        asyncio.get_running_loop().call_later(0.05, given_up.set)
        async with stage.store.transactions.turn():
            await asyncio.sleep(0)
    finally:
        given_up.set()
        await asyncio.wait([other])


# Everything else is one call.


def calls() -> Iterator[tuple[str, Operation]]:
    message = Message(routing_key="order.paid", body=b'"new"')
    yield "Outbox.backlog", lambda stage: stage.outbox.backlog()
    yield "Outbox.messages", lambda stage: stage.outbox.messages()
    yield "Outbox.find", lambda stage: stage.outbox.find("nobody")
    yield "Outbox.bindings", lambda stage: stage.outbox.bindings()
    yield "Outbox.unbind", lambda stage: stage.outbox.unbind("q")
    yield "Outbox.create_tables", lambda stage: stage.outbox.create_tables()
    yield "Outbox.check_tables", lambda stage: stage.outbox.check_tables()
    yield "Outbox.close", lambda stage: stage.outbox.close()
    yield "Store.open", lambda stage: stage.store.open()
    yield "Store.close", lambda stage: stage.store.close()
    yield "Maintenance.create_tables", lambda stage: stage.store.maintenance.create_tables()
    yield "Maintenance.check_tables", lambda stage: stage.store.maintenance.check_tables()
    yield "Maintenance.has_tables", lambda stage: stage.store.maintenance.has_tables()
    yield "Maintenance.record_transport", lambda stage: stage.store.maintenance.record_transport("other", switch=True)
    yield "Maintenance.recorded_transport", lambda stage: stage.store.maintenance.recorded_transport()
    yield "OwnersTable.record", lambda stage: stage.store.owners.record({"q": "shop", "other": "mails"})
    yield "OwnersTable.all", lambda stage: stage.store.owners.all()
    yield "OwnersTable.feeds", lambda stage: stage.store.owners.feeds()
    yield "OwnersTable.release", lambda stage: stage.store.owners.release("q")
    yield "OwnersTable.declare", lambda stage: stage.store.owners.declare([Binding("q", "#"), Binding("q", "new")])
    yield "OwnersTable.declared", lambda stage: stage.store.owners.declared()
    yield "OwnersTable.retract", lambda stage: stage.store.owners.retract(Binding("q", "#"))
    yield "Queues.bind", lambda stage: stage.store.queues.bind([Binding("new", "#"), Binding("newer", "new")])
    yield "Queues.unbind", lambda stage: stage.store.queues.unbind("q")
    yield "Queues.bindings", lambda stage: stage.store.queues.bindings()
    yield "Queues.deliver", lambda stage: stage.store.queues.deliver([message], {message.id: ["q", "other"]})
    yield "Queues.receive", lambda stage: stage.store.queues.receive("q", [message])
    yield "CircuitTable.all", lambda stage: stage.store.circuits.all()
    yield "CircuitTable.open", lambda stage: stage.store.circuits.open("d", HOUR, "away")
    yield "CircuitTable.probe", lambda stage: stage.store.circuits.probe("d", HOUR)
    yield "CircuitTable.close", lambda stage: stage.store.circuits.close("d")
    yield "Maintenance.purge", lambda stage: stage.store.maintenance.purge(HOUR, 10)
    yield "InboxTable.purge", lambda stage: stage.store.inbox.purge(HOUR, 10)
    yield "Maintenance.expire", lambda stage: stage.store.maintenance.expire(10)
    yield "Inspection.backlog", lambda stage: stage.store.inspection.backlog()
    yield "Inspection.list_messages", lambda stage: stage.store.inspection.list_messages()
    yield "Inspection.claimable", lambda stage: stage.store.inspection.claimable()
    yield "Inspection.examine", lambda stage: stage.store.inspection.examine()
    yield "Inspection.find", lambda stage: stage.store.inspection.find("nobody")
    yield "Transport.back", lambda stage: stage.outbox.transport.back()
    yield "Transport.bindings", lambda stage: stage.outbox.transport.bindings(["q"])
    yield "Transport.unbind", lambda stage: stage.outbox.transport.unbind(Binding("q", "#"))
    yield "Transport.counted", lambda stage: stage.outbox.transport.counted(["q"])
    yield "Transport.examine", lambda stage: stage.outbox.transport.examine()
    yield "DeadLetters.list", lambda stage: stage.outbox.dead_letters.list()
    yield "DeadLetters.chosen", lambda stage: stage.outbox.dead_letters.chosen(Filter())
    yield "DeadLetters.deaths", lambda stage: stage.outbox.dead_letters.deaths(HOUR)


COLD = (
    "Store.open",
    "Maintenance.has_tables",
    "Maintenance.create_tables",
    "Outbox.create_tables",
    "Outbox.backlog",
)

for name, operation in calls():
    case(name, warm=name not in COLD)(operation)


@case("DeadLetters.show")
async def show(stage: Stage) -> None:
    await stage.store.dead_letters.show(await stage.letter())


@case("DeadLetters.replay")
async def replay(stage: Stage) -> None:
    await stage.store.dead_letters.replay([await stage.letter()])


@case("DeadLetters.discard")
async def discard(stage: Stage) -> None:
    await stage.store.dead_letters.discard([await stage.letter()])


# What must hold.


@pytest.fixture
async def stage(database_url: str, table_name: str) -> AsyncIterator[Stage]:
    stage = Stage(database_url, table_name)
    await stage.begin()
    yield stage
    await stage.close()


def test_nothing_that_is_awaited_is_left_out() -> None:
    awaited = {
        f"{owner.__name__}.{name}"
        for owner in OWNERS
        for name, value in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and _is_awaited(value)
    }
    assert {case.name for case in CASES} == awaited


def _is_awaited(function: Callable[..., Any]) -> bool:
    returns = str(inspect.signature(function).return_annotation)
    return inspect.iscoroutinefunction(function) or returns.startswith(
        ("AbstractAsyncContextManager", "AsyncIterator", "Consumer")
    )


# What an outbox only passes on to its store is cut on one database.
PASSED_ON = tuple(
    f"Outbox.{name}" for name in ("backlog", "messages", "find", "bindings", "unbind", "create_tables", "check_tables")
)
# The operations are the same with each driver; how it connects, waits and is cut differs.
WITH_ANOTHER_DRIVER = (emit, emit_many, receive, route, settle, running)
# What serves does so in the same way: one on each database, and all on either.
SERVED_ON_SQLITE, SERVED_ON_POSTGRESQL = (message_relay, run, running), (worker, running)


def _is_cut_on(database: str, case: Case) -> bool:
    if database in ("postgresql+psycopg", "mariadb+asyncmy"):
        return case.operation in WITH_ANOTHER_DRIVER
    if case.operation in (*SERVED_ON_SQLITE, *SERVED_ON_POSTGRESQL):
        return case.operation in (SERVED_ON_SQLITE if database == "sqlite" else SERVED_ON_POSTGRESQL)
    return database == "sqlite" or case.name not in PASSED_ON


SWEEPS = [
    pytest.param(database, case, id=f"{database}-{case}")
    for database in DATABASES
    for case in CASES
    if _is_cut_on(database, case)
]


@pytest.mark.parametrize(("database_url", "case"), SWEEPS, indirect=["database_url"])
async def test_it_can_be_cancelled_wherever_it_waits(stage: Stage, case: Case) -> None:
    await _sweep(stage, case)


@asynccontextmanager
async def _entered_slowly(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Event]:
    """psycopg 3.3.9 and later gives other tasks a turn while it enters a pipeline, and so does every version here."""
    enter, entered = psycopg.AsyncPipeline.__aenter__, asyncio.Event()

    async def enter_and_wait(self: psycopg.AsyncPipeline) -> psycopg.AsyncPipeline:
        pipeline = await enter(self)
        entered.set()
        await asyncio.sleep(60)
        return pipeline

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.AsyncPipeline, "__aenter__", enter_and_wait)
        yield entered


@pytest.mark.parametrize("database_url", ["postgresql+psycopg"], indirect=True)
async def test_a_batch_that_is_cancelled_while_psycopg_begins_it_leaves_no_connection_in_its_pipeline(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def emit_two(*bodies: str) -> None:
        async with outbox.transaction() as session:
            connection = await (await session.connection()).get_raw_connection()
            driver: Any = connection.driver_connection
            assert driver.info.pipeline_status == psycopg.pq.PipelineStatus.OFF
            await outbox.emit_many(session, "order.paid", bodies)

    await outbox.create_tables()
    async with _entered_slowly(monkeypatch) as entered:
        task = asyncio.create_task(emit_two("cut", "off"))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for _ in range(2):  # on the connection that the pool has now
        await emit_two("in", "one")
    assert [stored.message.body for stored in await outbox.messages()] == [b'"in"', b'"one"'] * 2


@pytest.mark.parametrize("database_url", ["postgresql+psycopg"], indirect=True)
async def test_a_batch_that_is_cancelled_on_a_connection_of_psycopgs_own_ends_that_connection(
    outbox: Outbox, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await outbox.create_tables()
    connection = await psycopg.AsyncConnection.connect(database_url.replace("+psycopg", ""))
    async with _entered_slowly(monkeypatch) as entered:
        task = asyncio.create_task(outbox.emit_many(connection, "order.paid", ["cut", "off"]))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert connection.closed
    assert not await outbox.messages()


async def _sweep(stage: Stage, case: Case) -> None:
    before = await stage.look()
    uncut, after = await _cut(stage, case, MOST_SUSPENSIONS)
    assert not uncut.happened, f"{case} waits {MOST_SUSPENSIONS} times"
    seen = after
    for at in range(1, MOST_SUSPENSIONS):
        if seen != before:
            await stage.set()
        interruption, seen = await _cut(stage, case, at, lambda sight: _is_whole(case, before, after, sight))
        if not interruption.happened:
            return


async def _cut(
    stage: Stage, case: Case, at: int, is_whole: Callable[[Sight], bool] = lambda _: True
) -> tuple[Interrupted, Sight]:
    """What was cut, and what it left."""
    stage.renew_outbox()
    if case.warm:
        await stage.outbox.backlog()
    tasks = asyncio.all_tasks()
    with connections_taken() as taken:
        async with asyncio.timeout(60):
            interruption = await interrupted(case.operation(stage), at)
        seen = await _eventually_whole(stage, is_whole, f"{case} cut at suspension {at}")
        await stage.works()
        await stage.outbox.close()
        await stage.nothing_is_left_open(tasks, taken)
    return interruption, seen


async def _eventually_whole(stage: Stage, is_whole: Callable[[Sight], bool], what: str) -> Sight:
    """What was cut may end in the background; the last sight is the one to explain."""
    seen = await stage.look()
    try:
        async with asyncio.timeout(PATIENCE):
            while not is_whole(seen):
                await asyncio.sleep(0.02)
                seen = await stage.look()
    except TimeoutError:
        raise AssertionError(f"{what} left {seen}") from None
    return seen


def _is_whole(case: Case, before: Sight, after: Sight, sight: Sight) -> bool:
    """As it was or as it should be, or something on the way for what does many things one after another."""
    if not case.serves:
        return sight in (before, after)
    return _is_on_the_way(before, after, sight)


def _is_on_the_way(before: Sight, after: Sight, sight: Sight) -> bool:
    """Each message in one place and in nobody's hands, and handled if and only if its listener's work is there."""
    at_work = ("first", "second", "waiting")
    waiting = [sight.places.get(name, ()) for name in at_work]
    are_free = all(len(found) == 1 and found[0][3:] == (0, False) for found in waiting)
    handled = {name for name, found in zip(at_work, waiting, strict=True) if found and found[0][0] == "handled"}
    others = {*before.places, *after.places, *sight.places} - {*at_work}
    return (
        are_free
        and dict(sight.effects) == dict.fromkeys(handled, 1)
        and all(sight.places.get(name) in (before.places.get(name), after.places.get(name)) for name in others)
        and sight.bindings in (before.bindings, after.bindings)
    )
