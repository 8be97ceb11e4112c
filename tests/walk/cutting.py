"""Cutting: a prepared outbox, what lies in it, and what must be left when something on it was cut short."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Column, Integer, String, Table, delete, event, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import Pool

from outbox import Binding, Listener, Message, Outbox
from outbox.adapters import store_class
from outbox.core.attempt import Dead, Done, Reason
from outbox.core.store import Claim, Selection, Store
from outbox.stores.sqlite import prepare
from tests.support.observing import eventually

HOUR = timedelta(hours=1)
LEASE = timedelta(minutes=10)  # ends in no test, so that a lease which is left behind is seen

AFTERWARDS = "afterwards"

Place = tuple[str, str | None, int, int, bool]  # state, queue, attempts, crashes, whether it is leased


@dataclass(frozen=True)
class Sight:
    """What lies in the tables."""

    places: Mapping[str, tuple[Place, ...]]  # by what the message says
    bindings: frozenset[tuple[str, str]]
    effects: Mapping[str, int]  # rows that were written together with a message, or by its listener
    remembered: int
    transport: str | None


class Stage:
    """A database with a message in every state, and one outbox at a time on it."""

    def __init__(self, url: str, table_name: str) -> None:
        self.name = table_name
        self._url = url
        self.engine = self._make_engine()  # the application's
        self._beside = create_async_engine(url)  # ours, to look without being seen
        if self._beside.dialect.name == "sqlite":
            prepare(self._beside)
        self.tables = store_class(self.engine.dialect.name).tables_named(table_name)
        self.effects = Table(
            f"{table_name}_effects",
            self.tables.metadata,
            Column("id", Integer, primary_key=True),
            Column("name", String(50)),
        )
        self._saved: list[tuple[Table, list[dict[str, Any]]]] = []
        self._eyes = self._make_outbox(self._beside)
        self.outbox = self._make_outbox(self.engine)
        self.listener = Listener("order.#", self._listen, queue="q")

    @property
    def store(self) -> Store:
        return self.outbox.store

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    def renew_outbox(self) -> None:
        """One that has not done anything yet."""
        self.outbox = self._make_outbox(self.engine)

    def _make_outbox(self, engine: AsyncEngine) -> Outbox:
        return Outbox(
            db_engine=engine,
            table_name=self.name,
            clean_up_after=HOUR,
            inbox_retention=HOUR,
            lease=LEASE,
            poll_interval=0.2,
            grace=5,
            log=False,
        )

    def _make_engine(self) -> AsyncEngine:
        named: dict[str, Any] = {
            "postgresql+asyncpg": {"server_settings": {"application_name": self.name}},
            "postgresql+psycopg": {"application_name": self.name},
        }
        engine = create_async_engine(self._url, connect_args=named.get(self._url.split("://")[0], {}))
        if engine.dialect.name == "sqlite":
            prepare(engine)
        return engine

    async def close(self) -> None:
        await self.outbox.close()
        await self._eyes.close()
        await self.engine.dispose()
        await self._beside.dispose()

    # Before.

    async def begin(self) -> None:
        """Fill it; the outbox beside then opens a line that it keeps, which is none to be counted."""
        tasks = asyncio.all_tasks()
        async with self._beside.begin() as connection:
            await connection.run_sync(self.tables.metadata.create_all)
        await self._fill(self._eyes)
        await eventually(lambda: not (asyncio.all_tasks() - tasks))
        async with self._beside.connect() as connection:
            for table in self.tables.metadata.sorted_tables:
                kept = [column for column in table.columns if column.computed is None]
                rows = (await connection.execute(select(*kept))).mappings()
                self._saved.append((table, [dict(row) for row in rows]))

    async def set(self) -> None:
        """Let every row be as it was in the beginning."""
        async with self._beside.begin() as connection:
            for table, rows in self._saved:
                await connection.execute(delete(table))
                if rows:
                    await connection.execute(insert(table), rows)

    async def _fill(self, outbox: Outbox) -> None:
        """A message in every state: two in a queue, one not routed, a timer, and one each done, dead and expired."""
        store = outbox.store
        await store.queues.bind([Binding("q", "order.#")])
        await store.maintenance.record_transport("database")
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.paid", ["first", "second", "done", "dead"])
        await store.queues.route(10, {})
        async with store.feed.claim(Selection(limit=10, lease=LEASE, destination="q")) as claim:
            ids = attempt_ids(claim)
            await claim.settle({ids["done"]: Done(), ids["dead"]: Dead(Reason.REJECTED, "no")})
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.paid", "waiting")
            await outbox.emit(session, "order.paid", "timer", eta=HOUR, timer_id="timer")
            await outbox.emit(session, "order.paid", "expired", expiration=HOUR, eta=HOUR)
            await (await session.connection()).run_sync(store.writing.write, *store.inbox.remember("q", "remembered"))
        await self._age()

    async def _age(self) -> None:
        messages, past = self.tables.messages, datetime.now(UTC) - 2 * HOUR
        async with self._beside.begin() as connection:
            await connection.execute(update(messages).where(messages.c.done_at.is_not(None)).values(done_at=past))
            await connection.execute(update(messages).where(messages.c.expires_at.is_not(None)).values(expires_at=past))
            await connection.execute(update(self.tables.inbox).values(entered_at=past))

    # Between.

    async def write_effect(self, session: AsyncSession, name: str) -> None:
        await session.execute(insert(self.effects).values(name=name))

    async def _listen(self, body: str, session: AsyncSession) -> None:
        await self.write_effect(session, body)

    async def handled(self, *names: str) -> None:
        """Wait until listeners have written what they write."""
        await eventually(lambda: self._have_effects(names))

    async def _have_effects(self, names: tuple[str, ...]) -> bool:
        async with self._beside.connect() as connection:
            found = await connection.scalars(select(self.effects.c.name))
            return set(names) <= set(found)

    async def routed(self) -> None:
        """Wait until a router has seen to what waited."""
        messages = self.tables.messages
        waits = (
            select(func.count())
            .select_from(messages)
            .where(messages.c.destination == "", messages.c.timer_id.is_(None))
        )
        waits = waits.where(messages.c.expires_at.is_(None))

        async def none_waits() -> bool:
            async with self._beside.connect() as connection:
                return not await connection.scalar(waits)

        await eventually(none_waits)

    async def letter(self) -> int:
        """The id of the dead letter."""
        async with self._beside.connect() as connection:
            return int(await connection.scalar(select(self.tables.dead_letters.c.id)) or 0)

    # After.

    async def look(self) -> Sight:
        """By the eyes of an outbox that nobody cuts."""
        stored = await self._eyes.messages(limit=1000)
        letters = await self._eyes.dead_letters.list(limit=1000)
        bindings = await self._eyes.bindings()
        places: dict[str, list[Place]] = {}
        for each in stored:
            place = (each.state, each.queue, each.attempt_count, each.crash_count, each.leased_until is not None)
            places.setdefault(json.loads(each.message.body), []).append(place)
        for letter in letters:
            place = ("dead", letter.queue, letter.attempt_count, letter.crash_count, False)
            places.setdefault(json.loads(letter.message.body), []).append(place)
        async with self._beside.connect() as connection:
            counts = await connection.execute(select(self.effects.c.name, func.count()).group_by(self.effects.c.name))
            remembered = await connection.scalar(select(func.count()).select_from(self.tables.inbox))
            transport = await connection.scalar(
                select(self.tables.state.c.transport).where(self.tables.state.c.id == 1)
            )
        return Sight(
            {name: tuple(sorted(found, key=str)) for name, found in places.items() if name != AFTERWARDS},
            frozenset((each.queue, each.binding_key) for each in bindings),
            dict(map(tuple, counts)),
            remembered or 0,
            transport,
        )

    async def works(self) -> None:
        """The outbox that was cut short does everything as before."""
        async with asyncio.timeout(30):
            async with self.outbox.transaction() as session:
                assert await self.outbox.emit(session, "after.all", AFTERWARDS, eta=HOUR, timer_id=AFTERWARDS)
                assert await self.outbox.cancel_timer(session, AFTERWARDS)
            message = Message(routing_key="after.all", body=json.dumps(AFTERWARDS).encode())
            await self.store.queues.deliver([message], {message.id: [AFTERWARDS]})
            async with self.store.feed.claim(Selection(limit=10, lease=LEASE, destination=AFTERWARDS)) as claim:
                assert list(attempt_ids(claim)) == [AFTERWARDS]
                assert await claim.settle({each.id: Done() for each in claim.attempts}) == frozenset()

    async def nothing_is_left_open(self, tasks: AbstractSet[asyncio.Task[Any]], taken: AbstractSet[object]) -> None:
        """No task, no connection out of its pool, no transaction on the server."""
        await eventually(lambda: not (asyncio.all_tasks() - tasks))
        await eventually(lambda: not taken)
        if self.is_postgresql:
            await eventually(self._server_has_only_idle_ones)

    async def _server_has_only_idle_ones(self) -> bool:
        """No more connections than the application's pool keeps, each of them idle."""
        states = text("SELECT state FROM pg_stat_activity WHERE application_name = :name")
        async with self._beside.connect() as connection:
            found = list(await connection.scalars(states, {"name": self.name}))
        pool: Any = self.engine.pool
        if len(found) <= pool.checkedin() and set(found) <= {"idle"}:
            return True
        if self.engine.dialect.driver == "psycopg":
            gc.collect()  # cut while it connects, it leaves the server's side open until then, with an outbox or not
        return False


def attempt_ids(claim: Claim) -> dict[str, int]:
    """The attempts of a claim by what their messages say."""
    return {json.loads(attempt.message.body): attempt.id for attempt in claim.attempts}


@contextmanager
def connections_taken() -> Iterator[set[object]]:
    """The connections that are out of their pools, of whatever engine."""
    taken: set[object] = set()
    listeners: list[tuple[str, Callable[..., None]]] = [
        ("checkout", lambda connection, record, proxy: taken.add(record)),
        ("checkin", lambda connection, record: taken.discard(record)),
    ]
    for name, listener in listeners:
        event.listen(Pool, name, listener)
    try:
        yield taken
    finally:
        for name, listener in listeners:
            event.remove(Pool, name, listener)
