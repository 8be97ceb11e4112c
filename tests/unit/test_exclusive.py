"""Exclusive: a run that has to be alone waits for others, and not past a stop."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from outbox.inbound.concurrency import GO_ON, SHORTEST_WAIT, Exclusive


async def test_a_stop_ends_the_wait_and_delays_nothing_elsewhere() -> None:
    exclusive = Exclusive()
    exclusive.begin()
    asyncio.get_running_loop().call_later(2 * SHORTEST_WAIT / GO_ON, exclusive.stop)
    async with exclusive.alone() as pause:
        assert pause == timedelta(0)
    async with exclusive.alone() as pause:  # although others would go on undisturbed for longer than the shortest wait
        assert pause == timedelta(0)
