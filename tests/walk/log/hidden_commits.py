"""Hidden commits: what the log tells before other transactions see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from outbox.testing.servers import PostgreSQL


@asynccontextmanager
async def hidden_commit(server: PostgreSQL, commit: Callable[[], Any]) -> AsyncIterator[Callable[[], Any]]:
    """A commit that is in the log and that no other transaction sees yet: its standby does not answer."""
    engine = create_async_engine(server.url.replace("postgresql://", "postgresql+psycopg://"))
    administrator = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def standby(names: str) -> None:
        async with administrator.connect() as connection:
            await connection.execute(text(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'"))
            await connection.execute(text("SELECT pg_reload_conf()"))

    await standby("absent")
    await asyncio.sleep(0.3)
    committing = asyncio.create_task(commit())
    try:
        await asyncio.sleep(0.5)
        assert not committing.done()

        async def show() -> None:
            await standby("")
            await committing

        yield show
    finally:
        await standby("")
        await asyncio.wait([committing])
        await engine.dispose()
