"""Users: what the project's documentation emits, as one of its applications does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import Message, Outbox

JOHN: dict[str, Any] = {"id": 123, "username": "johndoe"}
Arrivals = asyncio.Queue[Any]

MAIN_APPLICATION = """
    import asyncio
    import sys

    from outbox import setup, emit
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    db_engine = create_async_engine(sys.argv[1])
    setup(db_engine=db_engine, table_name=sys.argv[2])

    async def main():
        async with AsyncSession(db_engine) as session, session.begin():
            await emit(session, "user.created", {"id": 123, "username": "johndoe"})
        await db_engine.dispose()

    asyncio.run(main())
"""


class User(BaseModel):
    id: int
    username: str


async def emit_and_commit(
    outbox: Outbox, routing_key: str = "user.created", body: object = JOHN, **options: Any
) -> Message:
    async with outbox.transaction() as session:
        message = await outbox.emit(session, routing_key, body, **options)
    assert message is not None
    return message


async def is_order_processed(db_engine: AsyncEngine, user_model: Any, order_id: int) -> bool:
    async with AsyncSession(db_engine) as session:
        return await session.get(user_model, order_id) is not None


def skipping_duplicates(db_engine: AsyncEngine, user_model: Any) -> Callable[[int], Awaitable[None]]:
    """The project's idempotent handler: the effect commits, the attempt fails, the next one finds it done."""

    async def process_order(order_id: int) -> None:
        if await is_order_processed(db_engine, user_model, order_id):
            return  # Skip duplicate
        async with AsyncSession(db_engine) as session, session.begin():
            session.add(user_model(id=order_id, username="processed"))
        raise ConnectionError("the answer was lost")

    return process_order
