"""Claim: how long one claim takes, however much waits or lies dead in the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from bench.database import Database
from bench.programs.payload import body
from bench.report import Report, at_most, number
from bench.settings import Settings
from bench.turns import in_turns, ratios
from outbox import Outbox
from outbox.core.attempt import Done, Outcome
from outbox.core.store import Selection

LIMIT = 100
FEW = 1_000
MANY = 1_000_000
TURNS = 10  # in a round
QUEUE = "bench"


@dataclass(frozen=True)
class State:
    """What a table holds: rows that died under an old snapshot, before rows that wait."""

    name: str
    waiting: int
    dead: int = 0


@dataclass(frozen=True)
class Prepared:
    """A table in such a state, in a database of its own."""

    outbox: Outbox
    database: Database

    async def fill(self, count: int) -> None:
        """Add copies of the one message that waits for tomorrow, routed and due."""
        messages = self.outbox.tables.messages
        given = {
            "destination": f"'{QUEUE}'",
            "message_id": "gen_random_uuid()::text",
            "due_at": "clock_timestamp()",
            "routed_at": "now()",
        }
        columns = [column.name for column in messages.c if column.name != "id"]
        values = ", ".join(given.get(name, name) for name in columns)
        await self.execute(
            f"INSERT INTO {messages.name} ({', '.join(columns)}) "
            f"SELECT {values} FROM {messages.name}, generate_series(1, {count}) WHERE destination = ''"
        )

    async def execute(self, statement: str) -> None:
        async with self.database.connection() as connection:
            await connection.execute(statement, timeout=600)

    async def claim(self) -> float:
        """Milliseconds until the messages are ours."""
        begun = time.monotonic()
        wanted = Selection(limit=LIMIT, lease=timedelta(minutes=1), destination=QUEUE)
        async with self.outbox.store.feed.claim(wanted) as claimed:
            took = time.monotonic() - begun
            outcomes: dict[int, Outcome] = {attempt.id: Done() for attempt in claimed.attempts}
            await claimed.settle(outcomes)
        if len(outcomes) != LIMIT:
            raise RuntimeError(f"a claim of {LIMIT} got {len(outcomes)}")
        await self.fill(LIMIT)
        return took * 1000


FEW_WAIT = State(f"{number(FEW)} waiting", FEW)
MANY_WAIT = State(f"{number(MANY)} waiting", MANY)
MANY_DEAD = State(f"{number(FEW)} waiting, {number(MANY)} dead under an old snapshot", FEW, MANY)


async def measure(database: Database, settings: Settings) -> Report:
    states = [FEW_WAIT, MANY_WAIT, MANY_DEAD]
    async with AsyncExitStack() as stack:
        ready = {state.name: await stack.enter_async_context(prepared(database, state)) for state in states}
        taken = await in_turns(
            states,
            settings.rounds * TURNS,
            lambda state: ready[state.name].claim(),
            lambda state: state.name,
        )
    to_few = {name: ratios(times, taken[FEW_WAIT.name]) for name, times in taken.items()}
    return Report(
        "Claim",
        f"Milliseconds for a claim of {LIMIT} messages, in {settings.rounds * TURNS} turns. What was claimed is "
        "settled and replaced, so that each claim finds the same.",
        ("", "median", "the first", "the longest", "median, to the first line"),
        [
            (
                name,
                number(statistics.median(times)),
                number(times[0]),
                number(max(times)),
                number(statistics.median(times) / statistics.median(taken[FEW_WAIT.name])),
            )
            for name, times in taken.items()
        ],
        [at_most(f"claim: {name}, to {FEW_WAIT.name}", 3, to_few[name]) for name in (MANY_WAIT.name, MANY_DEAD.name)],
    )


@asynccontextmanager
async def prepared(server: Database, state: State) -> AsyncIterator[Prepared]:
    """A database of its own for each state: a snapshot keeps the dead of its own database only."""
    name = f"claim_{state.waiting}_{state.dead}"
    async with server.connection() as connection:
        await connection.execute(f"CREATE DATABASE {name}")
    database = Database(server.url.rsplit("/", 1)[0] + f"/{name}")
    outbox = Outbox(db_engine_url=database.url_for("asyncpg"))
    ready = Prepared(outbox, database)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(outbox.close)
        async with outbox.transaction() as session:
            await outbox.emit(session, "bench.order", body(0), eta=timedelta(days=1))
        if state.dead:
            await ready.fill(state.dead)
            await stack.enter_async_context(database.old_snapshot())
            await ready.execute(f"DELETE FROM {outbox.tables.messages.name} WHERE destination = '{QUEUE}'")
        await ready.fill(state.waiting)
        await ready.execute(f"VACUUM ANALYZE {outbox.tables.messages.name}")
        yield ready
