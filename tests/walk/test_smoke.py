"""The walk of a message, once through everything."""

import asyncio
from typing import Any

from outbox import Message, Outbox, Reject, listen
from tests.support.commands import SOON, until


async def test_a_message_walks_from_emit_to_its_listeners(outbox: Outbox) -> None:
    seen: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    @listen("order.*", queue="billing", retry_delays=(0.05,))
    async def billing(order: dict[str, int], attempt_count: int) -> None:
        if attempt_count == 1:
            raise ConnectionError("not yet")
        await seen.put(("billing", order))

    @listen("#", queue="audit")
    async def audit(body: bytes, message: Message) -> None:
        await seen.put(("audit", message.routing_key))

    @listen("order.created", queue="broken")
    async def broken(order: object) -> None:
        raise Reject("never")

    async with outbox.running(listeners=[billing, audit, broken]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {"id": 1})
        arrived = [await asyncio.wait_for(seen.get(), SOON) for _ in range(2)]
        [letter] = await until(outbox.dead_letters.list)
    assert sorted(arrived) == [("audit", "order.created"), ("billing", {"id": 1})]
    assert (letter.queue, letter.reason, letter.message.body) == ("broken", "rejected", b'{"id":1}')
