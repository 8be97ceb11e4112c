"""Ours: `outbox worker bench.programs.ours:listeners`, and an emitter."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from bench.programs.emitting import obey
from bench.programs.telling import Telling
from outbox import Listener, listen, outbox

tell = Telling()


@listen("bench.order", queue="bench")
async def handle(body: dict[str, int | str]) -> None:
    tell(body)


async def ignore(body: dict[str, int | str]) -> None:
    """Never called: no message is for it."""


further = [
    Listener(f"bench.other.{number}", ignore, queue=f"bench {number}")
    for number in range(1, int(os.environ.get("BENCH_LISTENERS", "1")))
]
listeners = [handle, *further]


class Ours:
    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        return outbox.transaction()

    async def emit(self, session: AsyncSession, bodies: Sequence[dict[str, int | str]]) -> None:
        await outbox.emit_many(session, "bench.order", bodies)

    async def analyze(self, session: AsyncSession) -> None:
        if session.get_bind().dialect.name == "mysql":  # it would commit, and InnoDB counts by itself
            return
        await session.execute(text(f"ANALYZE {outbox.settings.table_name}"))


async def main() -> None:
    await outbox.create_tables()
    try:
        await obey(Ours())
    finally:
        await outbox.close()


if __name__ == "__main__":
    asyncio.run(main())
