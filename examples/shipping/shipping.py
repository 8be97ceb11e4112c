"""Shipping: one shipment for each order that was placed, whatever dies on the way."""

import asyncio
import os

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import listen, setup, transaction, worker

setup(db_engine_url=os.environ.get("OUTBOX_DB_ENGINE_URL", "sqlite+aiosqlite:///shipping.db"))


@listen("order.placed", queue="shipments", store_first=True)
async def ship(order: dict[str, str], session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO shipments VALUES (:id)"), order)
    print("shipping order", order["id"], flush=True)
    await asyncio.sleep(0.01)  # packing takes its time, and a kill comes here as likely as elsewhere


async def main() -> None:
    async with transaction() as session:
        # No key: nothing but the inbox keeps an order from being shipped twice.
        await session.execute(text("CREATE TABLE IF NOT EXISTS shipments (order_id TEXT)"))
    await worker([ship])


if __name__ == "__main__":
    asyncio.run(main())
