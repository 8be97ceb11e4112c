"""Moving to another transport and back, as docs/operate/moving.md tells it, while a producer never stops."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import aiormq
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.binding import Binding
from outbox.core.errors import TransportMismatch
from outbox.core.store import Backlog
from outbox.shutdown import Shutdown
from tests.support.amqp import channel_to
from tests.support.broker import VirtualHost
from tests.support.commands import Command, line_of
from tests.support.databases import on_both_stores
from tests.support.observing import eventually
from tests.support.outboxes import MakeOutbox

QUEUES = ("ledger", "journal", "shelf")
FEW = 5  # messages in each state
AGAIN = (0.3,) * 1000  # seconds, for longer than any test


@asynccontextmanager
async def process(outbox: Outbox, **options: Any) -> AsyncIterator[None]:
    """A relay or a worker, stopped as by SIGTERM at the end."""
    shutdown, ready = Shutdown(), asyncio.Event()
    running = asyncio.create_task(outbox.run(shutdown, ready=ready, **options))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    try:
        yield
    finally:
        shutdown.begun.set()
        assert await running == 0


class Shop:
    """Listeners whose effects are counted, and a producer that goes on whatever happens to the rest."""

    def __init__(self, outbox: Outbox, table_name: str) -> None:
        self.outbox = outbox
        self.emitted = 0
        self.emitted_to: defaultdict[str, set[int]] = defaultdict(set)
        self.handled: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.failed: Counter[int] = Counter()
        self.bank_is_away = False
        self._effects = Table(f"{table_name}_effects", MetaData(), Column("number", Integer))
        self.ledger = Listener("order.*", self._on_ledger, queue="ledger", retry_delays=AGAIN)
        self.journal = Listener("order.#", self._on("journal"), queue="journal")
        self.shelf = Listener("#.created", self._on("shelf"), queue="shelf")
        self.everything = [self.ledger, self.journal, self.shelf]

    def late(self, routing_key: str) -> Listener:
        """A listener that comes with the new transport."""
        return Listener(routing_key, self._on(routing_key), queue=f"late_{routing_key}")

    async def open(self) -> None:
        async with self.outbox.engines.asynchronous.begin() as connection:
            await connection.run_sync(self._effects.metadata.create_all)
        await self.outbox.create_tables()

    async def emit(self, count: int, routing_key: str = "order.created") -> set[int]:
        numbers = self._next(count)
        async with self.outbox.transaction() as session:
            await self.outbox.emit_many(session, routing_key, sorted(numbers))
        self._expect(numbers, [routing_key] if routing_key != "order.created" else QUEUES)
        return numbers

    async def start_timer(self, timer_id: str) -> None:
        [number] = self._next(1)
        async with self.outbox.transaction() as session:
            await self.outbox.emit(session, "order.created", number, eta=timedelta(hours=1), timer_id=timer_id)
        self._expect({number}, QUEUES)

    def _next(self, count: int) -> set[int]:
        self.emitted += count
        return set(range(self.emitted - count, self.emitted))

    def _expect(self, numbers: set[int], queues: Iterable[str]) -> None:
        for queue in queues:
            self.emitted_to[queue] |= numbers

    @asynccontextmanager
    async def producing(self) -> AsyncIterator[None]:
        stopping = asyncio.Event()

        async def produce() -> None:
            while not stopping.is_set():
                await self.emit(1)
                await asyncio.sleep(0.05)

        producing = asyncio.create_task(produce())
        try:
            yield
        finally:
            stopping.set()
            await producing

    async def effects(self) -> Counter[int]:
        async with self.outbox.transaction() as session:
            return Counter((await session.scalars(select(self._effects.c.number))).all())

    async def everything_handled(self) -> None:
        """Wait for all that was emitted until now."""
        wanted = {queue: set(numbers) for queue, numbers in self.emitted_to.items()}

        async def all_seen() -> bool:
            seen = {**self.handled, "ledger": await self.effects()}
            return all(numbers <= seen.get(queue, Counter()).keys() for queue, numbers in wanted.items())

        await eventually(all_seen)

    async def _on_ledger(self, number: int, session: AsyncSession) -> None:
        await session.execute(insert(self._effects).values(number=number))
        if self.bank_is_away:
            self.failed[number] += 1
            raise ConnectionError("the bank is away")

    def _on(self, name: str) -> Any:
        async def handle(number: int) -> None:
            self.handled[name][number] += 1

        return handle

    async def all_failed(self, numbers: Iterable[int]) -> bool:
        return all(self.failed[number] for number in numbers)

    async def let_timers_run_out(self) -> None:
        messages = self.outbox.tables.messages
        async with self.outbox.transaction() as session:
            timers = update(messages).where(messages.c.timer_id.is_not(None))
            await session.execute(timers.values(due_at=datetime.now(UTC)))


@pytest.fixture
async def shop(make_outbox: MakeOutbox, table_name: str) -> Shop:
    shop = Shop(make_outbox(), table_name)
    await shop.open()
    return shop


def in_queues(backlog: Backlog) -> int:
    return sum(queue.open for queue in backlog.queues)


@on_both_stores
async def test_moving_to_rabbitmq_and_back_loses_nothing_and_repeats_nothing(
    shop: Shop, make_outbox: MakeOutbox, command: Command, vhost: VirtualHost
) -> None:
    database, rabbitmq = make_outbox(), make_outbox(rabbitmq_url=vhost.url)
    late_there, late_back = shop.late("there.x"), shop.late("back.x")
    async with process(database, listeners=[shop.shelf]):
        pass  # its worker was here once, and is stopped before the others: messages wait in its queue
    async with shop.producing():
        await to_rabbitmq(shop, database, rabbitmq, command, late_there)
        await to_the_database(shop, database, rabbitmq, command, vhost, late_there, late_back)
    async with process(database, listeners=[*shop.everything, late_back]):
        await shop.everything_handled()
    assert shop.emitted > 8 * FEW
    assert set((await shop.effects()).values()) == {1}
    backlog = await database.backlog()
    assert (backlog.waiting, backlog.unroutable, backlog.dead, in_queues(backlog)) == (0, 0, 0, 0)


async def to_rabbitmq(shop: Shop, database: Outbox, rabbitmq: Outbox, command: Command, late: Listener) -> None:
    async with process(database, listeners=[shop.ledger, shop.journal]):
        await eventually(lambda: shop.handled["journal"])
        shop.bank_is_away = True
        retrying = await shop.emit(FEW)
        await shop.start_timer("there")
        await shop.emit(FEW, "there.x")
        await eventually(lambda: shop.all_failed(retrying))
        await eventually(lambda: _unroutable(database))
    # Step 3: the workers are stopped.
    await shop.emit(FEW)
    backlog = await database.backlog()
    queues = {queue.queue: queue for queue in backlog.queues}
    assert backlog.unroutable == FEW
    assert [stored.timer_id for stored in await database.messages(state="waiting") if stored.timer_id] == ["there"]
    assert backlog.due >= FEW
    assert (queues["ledger"].retrying or 0) >= FEW
    assert (queues["shelf"].queued or 0) >= FEW
    # Step 4: the switch.
    refused = await command.run("tables", "switch-transport", "rabbitmq")
    assert (refused.code, "outbox worker --leftovers" in refused.stderr) == (ExitCode.WRONG, True)
    assert (await command.run("tables", "switch-transport", "rabbitmq", "--force")).code == 0
    with pytest.raises(TransportMismatch):
        await database.run(Shutdown(), listeners=shop.everything)
    # Step 5: workers, then relays. Step 6: the leftovers.
    async with process(rabbitmq, listeners=[*shop.everything, late]), process(rabbitmq, relay=True):
        shop.bank_is_away = False
        async with process(database, listeners=shop.everything, leftovers=True):
            await eventually(lambda: _queues_are_empty(database))
        await shop.let_timers_run_out()
        await shop.everything_handled()


async def to_the_database(
    shop: Shop,
    database: Outbox,
    rabbitmq: Outbox,
    command: Command,
    vhost: VirtualHost,
    late_there: Listener,
    late_back: Listener,
) -> None:
    async with process(rabbitmq, listeners=[shop.ledger, shop.journal, late_there]):
        async with process(rabbitmq, relay=True):
            shop.bank_is_away = True
            retrying = await shop.emit(FEW)
            await shop.start_timer("back")
            await shop.emit(FEW, "back.x")
            await eventually(lambda: shop.all_failed(retrying))
            await eventually(lambda: _refused(database))
        # Step 2: the relays are stopped.
        await shop.emit(FEW)
        assert (await database.backlog()).due >= FEW
        assert await _lie_at(vhost, "shelf") >= FEW
        # Step 3: the switch. The workers of RabbitMQ go on.
        assert (await command.run("tables", "switch-transport", "database")).code == 0
        # Step 4: the workers of the database, one with all listeners first.
        async with process(database, listeners=[*shop.everything, late_back]):
            await eventually(lambda: shop.all_failed(retrying))
            # Step 5: one of RabbitMQ that starts again now serves leftovers.
            with pytest.raises(TransportMismatch):
                await rabbitmq.run(Shutdown(), listeners=shop.everything)
            async with process(rabbitmq, listeners=shop.everything, leftovers=True):
                shop.bank_is_away = False
                await shop.let_timers_run_out()
                await shop.everything_handled()
                await eventually(lambda: _all_empty(vhost))


async def test_a_worker_for_leftovers_binds_and_serves_its_queue_and_routes_nothing(
    sqlite_application: Command, sqlite_outbox: Outbox
) -> None:
    async with sqlite_outbox.transaction() as session:
        await sqlite_outbox.emit(session, "short", 1)
    queued = Message(routing_key="short", body=b"2")
    await sqlite_outbox.store.queues.deliver([queued], {queued.id: ["short"]})
    await sqlite_outbox.store.maintenance.record_transport("rabbitmq")
    with sqlite_application.started("worker", "application:short", "--leftovers") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        await eventually(lambda: _queues_are_empty(sqlite_outbox))
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0
        assert worker.stdout is not None
        assert worker.stdout.read().split() == ["ended"]
    assert await sqlite_outbox.bindings() == [Binding("short", "short")]
    assert [stored.message.body for stored in await sqlite_outbox.messages()] == [b"1"]
    assert await sqlite_outbox.store.maintenance.recorded_transport() == "rabbitmq"


async def _unroutable(outbox: Outbox) -> bool:
    return (await outbox.backlog()).unroutable == FEW


async def _refused(outbox: Outbox) -> bool:
    """The broker has no queue for these either: its relay has put them off."""
    waiting = await outbox.messages(state="waiting", limit=1000)
    return len([stored for stored in waiting if stored.attempt_count]) == FEW


async def _queues_are_empty(outbox: Outbox) -> bool:
    return not in_queues(await outbox.backlog())


async def _lie_at(vhost: VirtualHost, queue: str) -> int:
    async with channel_to(vhost.url) as channel:
        found = await channel.queue_declare(queue, passive=True)
    assert isinstance(found, aiormq.spec.Queue.DeclareOk)
    return found.message_count or 0


async def _all_empty(vhost: VirtualHost) -> bool:
    """What `rabbitmqctl list_queues name messages` would show."""
    return not any([await _lie_at(vhost, queue) for queue in vhost.queues()])
