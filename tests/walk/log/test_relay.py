"""A relay that reads the log: in commit order, and nothing is lost or left."""

from __future__ import annotations

from typing import Any

from outbox import Outbox

from .conftest import Place


async def test_messages_go_out_in_commit_order_and_leave_the_table(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    await emit("before")
    async with outbox.running(relay=True):
        async with outbox.transaction() as late:
            await outbox.emit(late, "order.created", b"late")
            await emit("early")
        await emit("a", "b")
        assert await place.until(5) == ["before", "early", "late", "a", "b"]
        await until_empty()
