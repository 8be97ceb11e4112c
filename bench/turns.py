"""Turns: everybody is measured once in each round, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Who = TypeVar("Who")
Measured = TypeVar("Measured")


async def in_turns(
    who: Sequence[Who], rounds: int, measure: Callable[[Who], Awaitable[Measured]], name: Callable[[Who], str] = str
) -> dict[str, list[Measured]]:
    """What was measured of each, round by round: A B C A B C …"""
    measured: dict[str, list[Measured]] = {name(each): [] for each in who}
    for turn in range(rounds):
        for each in who:
            one = await measure(each)
            measured[name(each)].append(one)
            print(f"  round {turn + 1}, {name(each)}: {one}", file=sys.stderr, flush=True)
    return measured


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """One ratio for each round."""
    return [this / that for this, that in zip(these, those, strict=True)]
