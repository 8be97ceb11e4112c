"""A failover accounts for what the dead primary had and the standby had not, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.checker import Kind, digest
from tests.chaos.evidence import Buried, Effect, FailOver, FinalTables
from tests.chaos.failovers import Verdict, judge, outages, pauses, told_and_vanished
from tests.chaos.history import COMMITTED, UNKNOWN, Emitted, History, Run, Struck, Transaction
from tests.chaos.specimens import emitted

KILLED, PROMOTED = 100.0, 101.0


def transaction(message: Emitted, outcome: str = COMMITTED) -> Transaction:
    return Transaction(f"order of {message.id}", (message,), outcome=outcome)


def effect(message: Emitted, at: float = 90.0) -> Effect:
    return Effect(message.id, "invoices", 1, digest(message), at)


KEPT, GONE, UNTOLD, REDONE = (emitted(id) for id in ("kept", "gone", "untold", "redone"))
HISTORY = History(
    transactions=[transaction(KEPT), transaction(GONE), transaction(UNTOLD, UNKNOWN), transaction(REDONE)],
    runs=[Run(message.id, "invoices", 1) for message in (KEPT, GONE, REDONE)],
)
ORDERS = frozenset({"order of kept", "order of redone"})
TOOK = FailOver(
    KILLED,
    PROMOTED,
    is_synchronous=False,
    vanished_orders=frozenset({"order of gone", "order of untold"}),
    vanished_effects=frozenset({("redone", "invoices")}),
    kept_messages=frozenset({"kept", "redone"}),
)


def verdict(took: FailOver, *effects: Effect, **others: object) -> Verdict:
    tables = FinalTables(ORDERS, effects, at_least_once=True, fail_overs=(took,))
    return judge(HISTORY, replace(tables, **others))  # type: ignore[arg-type]


def kinds(violations: object) -> list[tuple[Kind, str]]:
    return sorted((each.kind, each.what) for each in violations)  # type: ignore[attr-defined]


def test_a_lagging_standby_accounts_for_orders_effects_and_messages_that_the_primary_had() -> None:
    found = verdict(TOOK, effect(KEPT), effect(GONE))
    assert not found.violations
    assert kinds(found.forgotten) == [(Kind.LOST, "redone"), (Kind.PHANTOM, "gone"), (Kind.TORN, "order of gone")]


def test_a_synchronous_standby_accounts_for_nothing() -> None:
    found = verdict(replace(TOOK, is_synchronous=True), effect(KEPT), effect(GONE))
    assert not found.forgotten
    assert kinds(found.violations) == [(Kind.LOST, "redone"), (Kind.PHANTOM, "gone"), (Kind.TORN, "order of gone")]


def test_what_vanished_before_its_producer_was_told_is_no_violation() -> None:
    found = verdict(
        replace(TOOK, is_synchronous=True, vanished_orders=frozenset({"order of untold"})),
        effect(KEPT),
        effect(REDONE),
    )
    assert kinds(found.violations) == [(Kind.TORN, "order of gone")]


@pytest.mark.parametrize(
    ("took", "still"),
    [
        (
            replace(TOOK, vanished_orders=frozenset({"order of untold"})),
            [(Kind.PHANTOM, "gone"), (Kind.TORN, "order of gone")],
        ),
        (replace(TOOK, vanished_effects=frozenset({("redone", "ledger")})), [(Kind.LOST, "redone")]),
        (replace(TOOK, vanished_effects=frozenset()), [(Kind.LOST, "redone")]),
    ],
    ids=["an order that the primary never had", "an effect in another queue", "an effect that there never was"],
)
def test_what_the_primary_did_not_have_is_a_violation(took: FailOver, still: list[tuple[Kind, str]]) -> None:
    assert kinds(verdict(took, effect(KEPT), effect(GONE)).violations) == still


def test_a_message_that_outlives_its_data_is_a_violation_even_behind_a_lagging_standby() -> None:
    found = verdict(replace(TOOK, kept_messages=frozenset({"kept", "untold"})), effect(KEPT), effect(GONE))
    assert kinds(found.violations) == [(Kind.TORN, "untold")]


def test_an_altered_message_is_a_violation_whatever_was_taken() -> None:
    found = verdict(TOOK, effect(KEPT), replace(effect(REDONE), digest="other"))
    assert kinds(found.violations) == [(Kind.ALTERED, "redone")]


def test_a_dead_letter_of_a_vanished_order_is_accounted_for() -> None:
    letter = Buried(GONE, "invoices", "exhausted", 3, 0)
    found = verdict(TOOK, effect(KEPT), effect(REDONE), dead_letters=(letter,))
    assert not found.violations
    assert kinds(found.forgotten) == [(Kind.PHANTOM, "gone"), (Kind.TORN, "order of gone")]


def test_orders_that_a_producer_knew_are_counted_and_outages_measured() -> None:
    tables = FinalTables(effects=(effect(KEPT, at=100.5), effect(REDONE, at=104.0)), fail_overs=(TOOK,))
    assert told_and_vanished(HISTORY, tables) == 1
    assert outages(tables) == [4.0]


def test_a_pause_is_the_longest_time_without_an_effect_that_a_fault_overlaps() -> None:
    faults = [Struck("kill the leader", "broker", 10.0, 20.0), Struck("cut", "worker-0", 30.0, 31.0)]
    history = History(faults=faults)
    tables = FinalTables(effects=tuple(effect(KEPT, at) for at in (1.0, 9.0, 12.0, 18.0, 23.0, 60.0)))
    assert pauses(history, tables, "kill the leader") == [6.0]
    assert pauses(history, tables, "kill a node") == []
