"""Wake-ups: ending a sleep inside this process as soon as there may be work."""

import asyncio
import threading
import time

import pytest

from outbox.stores.wakeup import Wakeup

LONG = 30.0  # seconds that no test sleeps


async def asleep(wakeup: Wakeup, *destinations: str) -> list[asyncio.Task[bool]]:
    """Tasks that sleep until their bell rings."""
    tasks = [asyncio.create_task(wakeup.wait(destination, LONG)) for destination in destinations]
    await asyncio.sleep(0)
    return tasks


async def test_a_bell_ends_the_sleep_of_whoever_waits_for_it_and_of_nobody_else() -> None:
    wakeup = Wakeup()
    billing, audit = await asleep(wakeup, "billing", "audit")
    wakeup.ring("billing")
    assert await asyncio.wait_for(billing, LONG) is True
    assert not audit.done()
    audit.cancel()


async def test_every_bell_can_be_rung_at_once() -> None:
    wakeup = Wakeup()
    tasks = await asleep(wakeup, "billing", "audit", "")
    wakeup.ring_all()
    assert await asyncio.wait_for(asyncio.gather(*tasks), LONG) == [True, True, True]


async def test_a_sleep_nobody_ends_ends_by_itself_and_says_so() -> None:
    began = time.monotonic()
    assert await Wakeup().wait("billing", 0.02) is False
    assert time.monotonic() - began >= 0.015


async def test_a_ring_before_the_sleep_is_remembered_once() -> None:
    wakeup = Wakeup()
    assert await wakeup.wait("billing", 0.001) is False
    wakeup.ring("billing")
    wakeup.ring("billing")
    assert await wakeup.wait("billing", LONG) is True
    assert await wakeup.wait("billing", 0.001) is False


async def test_a_bell_can_be_rung_from_another_thread() -> None:
    wakeup = Wakeup()
    [billing] = await asleep(wakeup, "billing")
    thread = threading.Thread(target=wakeup.ring, args=("billing",))
    thread.start()
    assert await asyncio.wait_for(billing, LONG) is True
    thread.join(LONG)


def test_ringing_where_nobody_ever_slept_does_nothing() -> None:
    wakeup = Wakeup()
    wakeup.ring("billing")
    wakeup.ring_all()


@pytest.mark.parametrize("ring", [lambda wakeup: wakeup.ring("billing"), lambda wakeup: wakeup.ring_all()])
def test_an_outbox_may_outlive_its_event_loop(ring: object) -> None:
    wakeup = Wakeup()
    assert asyncio.run(wakeup.wait("billing", 0.001)) is False
    ring(wakeup)  # type: ignore[operator]  # its loop is closed: nobody can be waiting

    async def in_another_loop() -> bool:
        [billing] = await asleep(wakeup, "billing")
        wakeup.ring("billing")
        return await asyncio.wait_for(billing, LONG)

    assert asyncio.run(in_another_loop()) is True
