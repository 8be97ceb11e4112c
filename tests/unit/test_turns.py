"""Turns: one writes at a time, renewals first, the others as they came."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.errors import TransactionError
from outbox.stores.sqlite.runner import Turn, Turns

LONG = 30.0  # seconds that no test waits


async def writing(turn: Turn, name: str, written: list[str]) -> None:
    async with turn:
        written.append(name)
        await asyncio.sleep(0)


async def test_renewals_pass_those_who_wait_and_the_others_come_one_after_another() -> None:
    turns, written = Turns(), list[str]()
    async with turns.next:
        waiting = [asyncio.create_task(writing(turns.next, f"listener {number}", written)) for number in range(3)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(writing(turns.first, f"renewal {number}", written)) for number in range(2)]
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*waiting), LONG)
    assert written == ["renewal 0", "renewal 1", "listener 0", "listener 1", "listener 2"]


async def test_nobody_comes_between_one_and_the_next() -> None:
    turns, written = Turns(), list[str]()
    async with turns.next:
        waiting = asyncio.create_task(writing(turns.next, "who waited", written))
        await asyncio.sleep(0)
    await writing(turns.next, "who came late", written)  # the turn is free at this moment, and not this task's
    await waiting
    assert written == ["who waited", "who came late"]


@pytest.mark.parametrize("handed_over", [False, True], ids=["while it waits", "when it was handed over"])
async def test_who_is_cancelled_keeps_no_turn(handed_over: bool) -> None:
    turns, written = Turns(), list[str]()
    async with turns.next:
        cancelled = asyncio.create_task(writing(turns.next, "cancelled", written))
        after = asyncio.create_task(writing(turns.next, "after", written))
        await asyncio.sleep(0)
        if not handed_over:
            cancelled.cancel()
    cancelled.cancel()
    await asyncio.wait_for(after, LONG)
    await asyncio.wait_for(writing(turns.next, "at last", written), LONG)
    assert written == ["after", "at last"]
    assert cancelled.cancelled()


async def test_a_second_turn_of_one_task_is_refused() -> None:
    turns = Turns()
    async with turns.next:
        with pytest.raises(TransactionError, match="open in this task already"):
            async with turns.next:
                pytest.fail("it would wait for itself")
