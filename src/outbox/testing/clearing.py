"""Clearing: an outbox without rows, for the next test."""

from __future__ import annotations

from sqlalchemy import delete

from outbox.instance import Outbox


async def clear(outbox: Outbox) -> None:
    """Delete every row of an outbox's tables, bindings and dead letters included, and forget what was known of them.

    Call it between tests, while no relay or worker of the outbox runs. Without tables there is nothing to do.
    """
    if await outbox.store.maintenance.has_tables():
        async with outbox.transaction() as session:
            for table in reversed(outbox.metadata.sorted_tables):
                await session.execute(delete(table))
    await outbox.close()
    outbox.setup()  # without options: those that were given stay, and everything made of them is made anew
