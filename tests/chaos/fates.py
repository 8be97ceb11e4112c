"""Fates: what a producer plans for a message, and what must have become of it in the end.

A fate travels in the message's body, so that the listener knows how to misbehave, and in the producer's history, so
that the checker knows what to expect.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

MOST_ATTEMPTS = 3  # after as many planned failures a message is dead
MOST_CRASHES = 3  # after as many dead workers a poisonous message is dead
FOREVER = 1_000_000

REPLIES: Mapping[str, tuple[str, ...]] = {
    "reply.shipped": ("confirmations",),
    "reply.booked": ("bookings",),
}
QUEUES: Mapping[str, tuple[str, ...]] = {
    "order.placed": ("invoices",),
    "order.shared": ("invoices", "ledger"),
    "poison.pill": ("poison",),
    **REPLIES,
}


@dataclass(frozen=True)
class Fate:
    """How the listener behaves, and how it must end."""

    name: str
    failures: int = 0  # attempts that the listener fails on purpose
    reason: str | None = None  # why it is a dead letter in the end; none: it has its effect
    routing_key: str | None = None  # where only one will do


FATES: Mapping[str, Fate] = {
    fate.name: fate
    for fate in (
        Fate("fine"),
        Fate("slow"),
        Fate("fails once", failures=1),
        Fate("fails twice", failures=2),
        Fate("fails always", failures=FOREVER, reason="exhausted"),
        Fate("is rejected", failures=FOREVER, reason="rejected"),
        Fate("is no JSON", failures=FOREVER, reason="undecodable"),
        Fate("kills once", routing_key="order.placed"),
        Fate("kills always", failures=FOREVER, reason="crashed", routing_key="poison.pill"),
    )
}

# In a thousand messages; the rest are fine.
_SHARES = {"fails once": 30, "fails twice": 15, "fails always": 15, "is rejected": 10, "is no JSON": 5}
_SHARED = 0.1  # of all messages go to two queues


def choose(chance: random.Random, kills: float, slow: float) -> tuple[Fate, str]:
    """A fate and a routing key, with the shares of messages that kill their worker and that keep it."""
    if chance.random() < kills:
        fate = FATES["kills always" if chance.random() < 0.2 else "kills once"]
    elif chance.random() < slow:
        fate = FATES["slow"]
    else:
        throw = chance.random() * 1000
        fate = FATES["fine"]
        for name, share in _SHARES.items():
            throw -= share
            if throw < 0:
                fate = FATES[name]
                break
    anywhere = "order.shared" if chance.random() < _SHARED else "order.placed"
    return fate, fate.routing_key or anywhere
