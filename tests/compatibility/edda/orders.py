"""Orders: the example of edda. A service posts an event of each order to a URL, or to one that misbehaves."""

from __future__ import annotations

from typing import Any

from outbox import Message, Outbox
from outbox.core.store import StoredMessage

ORDER_CREATED = "order.created"


async def send(outbox: Outbox, routing_key: str = ORDER_CREATED, body: object = None, **options: Any) -> Message:
    """A committed event."""
    async with outbox.transaction() as session:
        message = await outbox.emit(session, routing_key, {"order_id": "ORD-1"} if body is None else body, **options)
    assert message is not None
    return message


async def states(outbox: Outbox, *sent: Message) -> list[str]:
    """The project's status of each: what is dead has its reason instead."""
    found = [await walk(outbox, message) for message in sent]
    return [each.reason or each.state for each in found]


async def walk(outbox: Outbox, message: Message) -> StoredMessage:
    """Where the event is now. It is in one place."""
    [found] = await outbox.find(message.id)
    return found


async def is_settled(outbox: Outbox) -> bool:
    """Whether no event is pending any more."""
    return (await outbox.backlog()).waiting == 0
