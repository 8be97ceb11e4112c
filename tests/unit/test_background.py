"""Background: whoever waits in a block learns that the work beside it has ended."""

from __future__ import annotations

import asyncio
import time

import pytest

from outbox.background import in_background
from outbox.core.errors import TransportClosed
from outbox.shutdown import Shutdown

LONG = 30.0  # seconds that no test waits


async def failing(shutdown: Shutdown, ready: asyncio.Event) -> None:
    ready.set()
    await asyncio.sleep(0.01)
    raise TransportClosed("for good")


async def patient(shutdown: Shutdown, ready: asyncio.Event) -> None:
    ready.set()
    await shutdown.begun.wait()


async def test_work_that_fails_ends_the_block_with_its_error() -> None:
    began = time.monotonic()
    with pytest.raises(TransportClosed, match="for good"):
        async with in_background(failing):
            await asyncio.sleep(LONG)
    assert time.monotonic() - began < LONG / 2
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_block_that_heeds_no_cancellation_raises_the_error_at_its_end() -> None:
    with pytest.raises(TransportClosed):
        async with in_background(failing):
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
    await asyncio.sleep(0)


async def test_a_block_that_ends_before_that_gets_no_cancellation() -> None:
    async with in_background(patient):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_is_one() -> None:
    async def block() -> None:
        async with in_background(patient):
            await asyncio.sleep(LONG)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LONG)
    assert task.cancelled()


async def test_work_that_cannot_begin_raises_before_the_block() -> None:
    async def wrong(shutdown: Shutdown, ready: asyncio.Event) -> None:
        raise TransportClosed("from the beginning")

    with pytest.raises(TransportClosed, match="from the beginning"):
        async with in_background(wrong):
            pytest.fail("it never began")
    await asyncio.sleep(0)
