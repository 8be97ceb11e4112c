"""Contenders: who is measured, and how their programs are started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

from bench.database import Database
from bench.processes import Program, program

LOG_LEVEL = "warning"  # as for the peers, which log nothing here: a line for each message costs more than the message


@dataclass(frozen=True)
class Contender:
    """A library, or a limit: its programs, and the table in which its messages wait."""

    name: str
    worker: tuple[str, ...]
    emitter: tuple[str, ...]
    table: str
    environment: Mapping[str, str] = field(default_factory=dict)
    waiting: str = "true"  # of which rows that is so

    def working(self, *, tell_every: int, **further: str) -> AbstractAsyncContextManager[Program]:
        return program(self.worker, {**self.environment, "BENCH_TELL_EVERY": str(tell_every), **further})

    @asynccontextmanager
    async def emitting(self) -> AsyncIterator[Program]:
        """Its emitter, with its tables made and connected."""
        async with program(self.emitter, {**self.environment, "BENCH_TELL_EVERY": "1"}) as emitter:
            await emitter.heard()
            yield emitter

    async def emptied(self, database: Database) -> None:
        """Wait until none of its messages waits any more."""
        async with database.connection() as connection:
            while await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {self.table} WHERE {self.waiting})"):
                await asyncio.sleep(0.02)  # each look steps over all rows that are dead by now

    async def clear(self, database: Database) -> None:
        async with database.connection() as connection:
            await connection.execute(f"TRUNCATE {self.table}")


def ours(database: Database, table: str = "outbox_table") -> Contender:
    return Contender(
        "outbox",
        (sys.executable, "-m", "outbox", "worker", "bench.programs.ours:listeners", "--log-level", LOG_LEVEL),
        (sys.executable, "-m", "bench.programs.ours"),
        table,
        {"OUTBOX_DB_ENGINE_URL": database.url_in_loop, "OUTBOX_TABLE_NAME": table},
    )


def delete_returning(database: Database) -> Contender:
    table = "limit_table"
    same_shape = ours(database, table)
    return Contender(
        "DELETE … RETURNING",
        (sys.executable, "-m", "bench.programs.delete_returning"),
        same_shape.emitter,
        table,
        {**same_shape.environment, "BENCH_URL": database.url},
    )


def faststream_outbox(database: Database, python: str) -> Contender:
    return _peer("faststream-outbox", "faststream_outbox", database, python)


def pgqueuer(database: Database, python: str) -> Contender:
    return _peer("pgqueuer", "pgqueuer", database, python)


def edda(database: Database, python: str, sink: str) -> Contender:
    contender = _peer("edda-framework", "edda", database, python)
    environment = {**contender.environment, "BENCH_SINK": sink}
    # Its rows stay.
    return replace(contender, table="outbox_events", environment=environment, waiting="status <> 'published'")


def _peer(name: str, module: str, database: Database, python: str) -> Contender:
    start = (python, "-m", f"bench.programs.{module}")
    # Their tables are called as their modules are.
    return Contender(name, (*start, "work"), (*start, "emit"), module, {"BENCH_URL": database.url, "PYTHONPATH": ""})
