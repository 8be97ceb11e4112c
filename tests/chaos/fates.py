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
ORDERS: Mapping[str, tuple[str, ...]] = {
    "order.placed": ("invoices",),
    "order.shared": ("invoices", "ledger"),
}
QUEUES: Mapping[str, tuple[str, ...]] = {
    **ORDERS,
    "poison.pill": ("poison",),
    "hang.up": ("hangs",),
    "thread.hangs": ("plain-hangs",),
    "driver.commits": ("drivers", "plain-drivers"),
    **REPLIES,
}


@dataclass(frozen=True)
class Fate:
    """How the listener behaves, and how it must end."""

    name: str
    failures: int = 0  # attempts that the listener fails on purpose, or by a mistake
    reason: str | None = None  # why it is a dead letter in the end; none: it has its effect
    routing_key: str | None = None  # where only one will do
    mistake: str = ""  # what the listener does wrong, after it has written its effect
    mistakes: int = 0  # attempts in which it does so
    goes_on: bool = False  # and catches the error that says so, as if nothing had happened
    keeps: bool = False  # its effect may be there although it is a dead letter


SWALLOWS = "swallows an error"  # of a statement, without a savepoint
CLOSES = "closes its session"
LEAVES = "leaves its session"  # by the end of a `with` block
COMMITS = "commits its session"
ROLLS_BACK = "rolls its session back"
COMMITS_CONNECTION = "commits its connection"
CLOSES_CONNECTION = "closes its connection"
SENDS_COMMIT = "sends COMMIT"
SENDS_ROLLBACK = "sends ROLLBACK"
HANGS = "hangs"  # for longer than its timeout
HANGS_ON = "hangs on"  # and does not heed its cancellation
HANGS_IN_THREAD = "hangs in a thread"  # which nothing can stop
COMMITS_BY_DRIVER = "commits by its driver"
FORKS = "forks"
UNANSWERED = "is not answered"  # by its destination over HTTP, when it is sent first

ENDINGS = (  # of the listener's transaction, or of what it is worth
    SWALLOWS,
    CLOSES,
    LEAVES,
    COMMITS,
    ROLLS_BACK,
    COMMITS_CONNECTION,
    CLOSES_CONNECTION,
    SENDS_COMMIT,
    SENDS_ROLLBACK,
)
HANGING = {HANGS: "hang.up", HANGS_ON: "hang.up", HANGS_IN_THREAD: "thread.hangs"}  # and where these go
# Mistakes that are not made as long as the library cannot take them.
SWITCHED_OFF: tuple[str, ...] = ()


def _mistaken(mistake: str) -> tuple[Fate, ...]:
    """Once and always; and once by a listener that hears of it and goes on, which may then end as it likes."""
    key = HANGING.get(mistake)
    return (
        Fate(f"{mistake} once", 1, None, key, mistake, mistakes=1),
        Fate(f"{mistake} always", FOREVER, "exhausted", key, mistake, mistakes=FOREVER),
        *([Fate(f"{mistake} and goes on", 0, None, key, mistake, mistakes=1, goes_on=True)] if key is None else []),
    )


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
        *(fate for mistake in (*ENDINGS, *HANGING) for fate in _mistaken(mistake)),
        Fate(COMMITS_BY_DRIVER, FOREVER, "rejected", "driver.commits", COMMITS_BY_DRIVER, FOREVER, keeps=True),
        Fate(FORKS, mistake=FORKS, mistakes=1),
        Fate(UNANSWERED, mistake=UNANSWERED),
    )
}

# In a thousand messages; the rest are fine.
_SHARES = {"fails once": 30, "fails twice": 15, "fails always": 15, "is rejected": 10, "is no JSON": 5}
_SHARED = 0.1  # of all messages go to two queues

# Among mistakes; those that are not named here count once.
_WEIGHTS = {COMMITS_BY_DRIVER: 3, FORKS: 6, UNANSWERED: 3, f"{SWALLOWS} once": 4, f"{SWALLOWS} always": 2}
MISTAKES: Mapping[str, int] = {
    fate.name: _WEIGHTS.get(fate.name, 1)
    for fate in FATES.values()
    if fate.mistake and fate.mistake not in SWITCHED_OFF
}


def choose(chance: random.Random, kills: float, slow: float, mistakes: float) -> tuple[Fate, str]:
    """A fate and a routing key, with the shares of messages that kill their worker, keep it, or meet a mistake."""
    if chance.random() < kills:
        fate = FATES["kills always" if chance.random() < 0.2 else "kills once"]
    elif chance.random() < slow:
        fate = FATES["slow"]
    elif chance.random() < mistakes:
        fate = FATES[chance.choices(list(MISTAKES), list(MISTAKES.values()))[0]]
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
