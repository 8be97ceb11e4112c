"""Failovers: what the promotion of a standby took with it, and which broken promises that accounts for.

With synchronous replication it accounts for none. Without, what was lost is told, transaction by transaction, by the
dead primary itself; whatever else is missing is a violation as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.checker import Kind, Violation, check
from tests.chaos.evidence import FinalTables, Place
from tests.chaos.history import COMMITTED, History


@dataclass
class Verdict:
    """Broken promises, and those that a database broke which had forgotten what it had committed."""

    violations: list[Violation] = field(default_factory=list)
    forgotten: list[Violation] = field(default_factory=list)


def judge(history: History, tables: FinalTables) -> Verdict:
    """What the checker finds, and whether a failover accounts for it."""
    taken = Taken.of(history, tables)
    verdict = Verdict(list(_halves(history, tables)))
    for violation in check(history, tables):
        (verdict.forgotten if taken.accounts_for(violation) else verdict.violations).append(violation)
    return verdict


@dataclass(frozen=True)
class Taken:
    """What failovers with asynchronous replication took."""

    orders: frozenset[str]
    messages: frozenset[str]  # of these orders
    effects: frozenset[Place]

    @classmethod
    def of(cls, history: History, tables: FinalTables) -> Taken:
        lossy = [each for each in tables.fail_overs if not each.is_synchronous]
        orders = frozenset().union(*(each.vanished_orders for each in lossy))
        effects = frozenset().union(*(each.vanished_effects for each in lossy))
        return cls(orders, frozenset(_messages(history, orders)), effects)

    def accounts_for(self, violation: Violation) -> bool:
        match violation.kind:
            case Kind.TORN:  # the producer was told that it committed
                return violation.what in self.orders
            case Kind.PHANTOM:  # the broker had the message already
                return violation.what in self.messages
            case Kind.LOST:  # it was acknowledged when its effect was committed
                return (violation.what, violation.queue) in self.effects
            case _:
                return False


def told_and_vanished(history: History, tables: FinalTables) -> int:
    """Transactions that a producer knew to be committed, and that vanished."""
    vanished = frozenset().union(*(each.vanished_orders for each in tables.fail_overs))
    return sum(each.outcome == COMMITTED and each.number in vanished for each in history.transactions)


def outages(tables: FinalTables) -> list[float]:
    """For each failover, the seconds from the kill to the next effect."""
    effects = sorted(effect.at for effect in tables.effects)
    after = [[at for at in effects if at > each.promoted_at] for each in tables.fail_overs]
    return [found[0] - each.killed_at for each, found in zip(tables.fail_overs, after, strict=True) if found]


def pauses(history: History, tables: FinalTables, kind: str) -> list[float]:
    """For each fault of that kind, the longest time without an effect that it overlaps."""
    effects = sorted(effect.at for effect in tables.effects)
    gaps = list(pairwise(effects))
    struck = [fault for fault in history.faults if fault.kind == kind]
    found = [[end - start for start, end in gaps if start <= each.ended and end >= each.began] for each in struck]
    return [max(each) for each in found if each]


def _halves(history: History, tables: FinalTables) -> Iterator[Violation]:
    """Data and messages vanish together: no message is there whose transaction is not."""
    for each in tables.fail_overs:
        for message_id in sorted(_messages(history, each.vanished_orders) & each.kept_messages):
            yield Violation(Kind.TORN, message_id, "the standby had the message, and not the row beside it")


def _messages(history: History, orders: frozenset[str]) -> set[str]:
    return {message.id for each in history.transactions if each.number in orders for message in each.messages}
