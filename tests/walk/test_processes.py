"""Real processes on one database: races, kills at the worst moments, and twenty thousand messages."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import pytest

from outbox import Outbox
from tests.support.observing import let_leases_run_out

from .shops import SOON, Shop, effects, emptied, no_surprises

MOMENTS = [
    "listener",
    "before settle",
    "after settle",
    "before the settling statement",
    "after the settling statement",
    "before the claiming statement",
    "after the claiming statement",
    "before routing",
    "after routing",
]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_at_any_moment_loses_nothing_and_repeats_no_effect(
    moment: str, outbox: Outbox, shop: Shop
) -> None:
    shop.run("produce", "0", "40", "10")
    doomed = shop.start("worker", DIE_AT=moment)
    assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
    shop.start("worker", SHOP_LEASE="30")
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(40), 1))
    assert set(shop.journalled()) == set(range(40)), "effects outside of the session happen at least once"
    assert await outbox.dead_letters.list() == []


async def test_a_message_that_kills_every_worker_is_dead_and_condemns_no_other(outbox: Outbox, shop: Shop) -> None:
    shop.run("produce", "0", "5", "5")
    for _ in range(3):
        shop.live_again()
        doomed = shop.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
        assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
        await let_leases_run_out(outbox)
    shop.live_again()
    shop.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
    await emptied(outbox)
    [letter] = await outbox.dead_letters.list()
    assert (letter.message.body, letter.reason, letter.crash_count) == (b"3", "crashed", 3)
    assert await effects(outbox, shop) == Counter(dict.fromkeys((0, 1, 2, 4), 1))


async def test_two_workers_race_for_every_message_and_neither_repeats_one(outbox: Outbox, shop: Shop) -> None:
    workers = [shop.start("worker", "ledger", SHOP_LEASE="30") for _ in range(2)]
    shop.run("produce", "0", "400", "20")
    with no_surprises(shop):
        await emptied(outbox)
        shop.stop()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(400), 1))


async def test_twenty_thousand_messages_through_several_processes(outbox: Outbox, shop: Shop) -> None:
    """A producer, two workers and, where several can write at once, a relay of its own beside them."""
    beside = [] if "sqlite" in str(outbox.engines.main.url) else [shop.start("relay", SHOP_LEASE="60")]
    workers = [shop.start("worker", "journal", SHOP_LEASE="60") for _ in range(2)]
    with no_surprises(shop):
        producer = shop.start("produce", "0", "20000", "100")
        assert await asyncio.to_thread(producer.wait, SOON) == 0, shop.logs()[-2000:]
        await emptied(outbox)
        shop.stop()
    assert [process.returncode for process in workers + beside] == [0] * len(workers + beside)
    journal = shop.journalled()
    assert len(journal) == 20_000
    assert set(journal) == set(range(20_000))
