"""http_app() in real processes, which are killed at the worst moments."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from outbox import Outbox
from tests.support.databases import on_both_stores
from tests.support.observing import eventually
from tests.support.sending import Sender, structured

from .shops import SOON, Shop, effects, emptied

pytestmark = on_both_stores

FEW = 40


async def served(shop: Shop, folder: Path, **environment: str) -> tuple[subprocess.Popen[bytes], Sender]:
    """A process that takes orders, and a way to send them."""
    told = folder / f"port-{len(shop.processes)}"
    process = shop.start("serve", SHOP_PORT=str(told), **environment)
    await eventually(lambda: told.exists() or process.poll() is not None)
    assert told.exists(), shop.logs()
    return process, Sender(int(told.read_text()))


async def unanswered(sender: Sender, orders: set[int]) -> set[int]:
    """Send orders at once; those that nobody took."""

    async def is_taken(order: int) -> bool:
        try:
            return (await sender.post(*structured(order, id=f"order-{order}"))).is_taken
        except (OSError, EOFError):
            return False

    taken = await asyncio.gather(*map(is_taken, orders))
    return {order for order, is_taken in zip(orders, taken, strict=True) if not is_taken}


@pytest.mark.parametrize(
    "moment",
    [
        "before the storing statements",
        "after the storing statements",  # and before their commit
        "before answering",  # and after the commit
        "after answering",
        "listener",
    ],
)
async def test_a_process_killed_between_storing_answering_and_handling_loses_nothing_and_repeats_no_effect(
    moment: str, outbox: Outbox, shop: Shop, tmp_path: Path
) -> None:
    doomed, sender = await served(shop, tmp_path, DIE_AT=moment)
    left = await unanswered(sender, set(range(FEW)))
    assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL, shop.logs()
    _, sender = await served(shop, tmp_path, SHOP_LEASE="30")
    again = left | {0}  # a sender whose answer was lost sends again what was taken
    assert await unanswered(sender, again) == set()
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(FEW), 1))
    assert await outbox.dead_letters.list() == []


async def test_a_process_that_is_stopped_answers_what_it_was_asked_and_handles_what_it_began(
    outbox: Outbox, shop: Shop, tmp_path: Path
) -> None:
    process, sender = await served(shop, tmp_path, SHOP_LEASE="30")
    assert await unanswered(sender, set(range(FEW))) == set()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, SOON) in (0, -signal.SIGTERM), shop.logs()
    _, sender = await served(shop, tmp_path, SHOP_LEASE="30")
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(FEW), 1))
