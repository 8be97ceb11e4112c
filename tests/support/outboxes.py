"""Outboxes: how tests get them, and give them messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import DBAPIError

from outbox import Outbox

MakeOutbox = Callable[..., Outbox]  # takes the options of an outbox; the fixture `make_outbox` is one


async def emit(outbox: Outbox, *bodies: object, routing_key: str = "order.created", **options: Any) -> None:
    """Messages with these bodies, in a transaction of their own."""
    async with outbox.transaction() as session:
        await outbox.emit_many(session, routing_key, bodies, **options)


async def dropped(outbox: Outbox) -> bool:
    """Whether the slot is gone: the server takes a moment to see that a relay has ended."""
    try:
        await outbox.wal.drop()
    except DBAPIError:
        return False
    return True
