"""Orders: places some, and tells of each one in the transaction that places it."""

import asyncio
import os
import sys
from uuid import uuid4

from sqlalchemy import text

from outbox import Message, Outbox, emit, message_relay, setup, transaction

shipping = Outbox(db_engine_url="sqlite+aiosqlite:///shipping.db")


async def hand_over(message: Message) -> None:
    """Without a broker, a message goes straight to the inbox of shipping, which knows a copy by its id."""
    await shipping.receive("shipments", message, unwanted="wait")


setup(
    db_engine_url=os.environ.get("OUTBOX_DB_ENGINE_URL", "sqlite+aiosqlite:///orders.db"),
    transport=os.environ.get("OUTBOX_TRANSPORT", hand_over),
)


async def place_order() -> None:
    order = {"id": str(uuid4())}
    async with transaction() as session:
        await session.execute(text("INSERT INTO orders VALUES (:id)"), order)
        await emit(session, "order.placed", order)
    print("placed order", order["id"], flush=True)


async def main(how_many: int) -> None:
    async with transaction() as session:
        await session.execute(text("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)"))
    for _ in range(how_many):
        await place_order()
    await message_relay()
    await shipping.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
