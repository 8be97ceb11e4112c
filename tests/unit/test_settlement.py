"""Settlement: what waits for it is told once, and told the first thing that is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from outbox.core.settlement import Settlement

WAYS: dict[str, Callable[[Settlement], None]] = {
    "written": lambda landing: landing.set_result(True),
    "lost": lambda landing: landing.set_result(False),
    "cancelled": Settlement.cancel,
}


def known(landing: Settlement) -> bool | None:
    """What a landing knows: none if it was cancelled."""
    return None if landing.cancelled() else landing.result()


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_it_calls_back_once_with_what_was_known_first(first: str, second: str) -> None:
    landing = Settlement()
    told: list[bool | None] = []
    landing.then(lambda landing: told.append(known(landing)))
    landing.then(lambda landing: told.append(known(landing)))
    assert not landing.done()
    WAYS[first](landing)
    WAYS[second](landing)
    assert told == [{"written": True, "lost": False, "cancelled": None}[first]] * 2


def test_whoever_comes_late_is_called_back_at_once() -> None:
    landing = Settlement()
    landing.set_result(True)
    told: list[bool | None] = []
    landing.then(lambda landing: told.append(known(landing)))
    assert told == [True]


def test_it_does_not_guess() -> None:
    with pytest.raises(asyncio.InvalidStateError):
        Settlement().result()


@pytest.mark.parametrize("written", [True, False])
async def test_it_can_be_awaited_before_and_after_it_is_known(written: bool) -> None:
    landing = Settlement()
    asyncio.get_running_loop().call_soon(landing.set_result, written)
    assert await landing is written
    assert await landing is written


async def test_awaiting_what_nobody_will_know_ends_in_a_cancellation() -> None:
    landing = Settlement()
    asyncio.get_running_loop().call_soon(landing.cancel)
    with pytest.raises(asyncio.CancelledError):
        await landing
