"""The ledger: what should be in the file and what is, counted with sqlite3 alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

LISTENERS = ("billing", "warehouse", "courier")


@dataclass(frozen=True)
class Plan:
    """What was done to the shop, from the outside."""

    placed: frozenset[int]  # orders whose transaction committed
    rolled_back: frozenset[int]
    slow: frozenset[int]  # orders whose bank answers at the third attempt
    runs: int  # how often a listener began, in all workers
    replayed: int


@dataclass(frozen=True)
class Entry:
    """One line: it balances if what was counted is what was expected."""

    what: str
    expected: int
    counted: int
    at_least: bool = False

    @property
    def balances(self) -> bool:
        return self.counted >= self.expected if self.at_least else self.counted == self.expected


class Witness:
    """Reads the file without a word of the library."""

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, timeout=30)

    def close(self) -> None:
        self._connection.close()

    def count(self, statement: str, *values: object) -> int:
        return int(self._connection.execute(statement, values).fetchone()[0])

    def effects(self) -> dict[str, int]:
        """How many effects each listener has had so far."""
        return dict(self._connection.execute("SELECT listener, count(*) FROM effects GROUP BY listener"))

    def dead_letters(self) -> int:
        return self.count("SELECT count(*) FROM outbox_table_dead_letters")

    def open_messages(self) -> int:
        return self.count("SELECT count(*) FROM outbox_table WHERE done_at IS NULL")

    def message_ids(self) -> tuple[str, str]:
        """A message that failed before it was handled, and one whose attempt never ended."""
        failed = self._connection.execute("SELECT message_id FROM outbox_table WHERE attempts > 1").fetchone()
        cut = self._connection.execute("SELECT message_id FROM outbox_table WHERE starts > attempts").fetchone()
        return failed[0], cut[0]

    def leased(self) -> int:
        return self.count("SELECT count(*) FROM outbox_table WHERE lease_token IS NOT NULL")


def balance(file: Path, plan: Plan) -> list[Entry]:
    """Every entry, in the order in which they are told."""
    with closing(Witness(file)) as witness:
        return list(_entries(witness, plan))


def _entries(witness: Witness, plan: Plan) -> Iterator[Entry]:
    committed = witness.count("SELECT count(*) FROM orders")
    yield Entry("orders committed", len(plan.placed), committed)
    yield Entry("traces of rolled back orders", 0, _traces(witness, sorted(plan.rolled_back)))
    for listener in LISTENERS:
        yield Entry(f"{listener}: messages handled", committed, witness.count(_HANDLED, listener))
    for listener in LISTENERS:
        yield Entry(f"{listener}: orders with exactly one effect", committed, witness.count(_ONCE, listener))
    yield Entry("effects altogether", committed * len(LISTENERS), witness.count("SELECT count(*) FROM effects"))
    yield Entry("failed twice, then succeeded", len(plan.slow), witness.count(_THIRD_TIME, "billing"))
    yield Entry("dead letters replayed", 1, plan.replayed)
    yield Entry("dead letters left", 0, witness.dead_letters())
    yield Entry("messages left", 0, witness.open_messages())
    ended = witness.count("SELECT sum(attempts) FROM outbox_table") + plan.replayed  # a replay counts from 0 again
    yield Entry("listener runs undone by SIGKILL", 1, plan.runs - ended, at_least=True)


_HANDLED = "SELECT count(*) FROM outbox_table WHERE destination = ? AND done_at IS NOT NULL"
_THIRD_TIME = "SELECT count(*) FROM outbox_table WHERE destination = ? AND done_at IS NOT NULL AND attempts = 3"
_ONCE = """
    SELECT count(*) FROM orders
    WHERE (SELECT count(*) FROM effects WHERE effects.order_id = orders.id AND effects.listener = ?) = 1
"""


def _traces(witness: Witness, rolled_back: Sequence[int]) -> int:
    """Rows anywhere that speak of these orders: data, effects, messages, dead letters."""
    return sum(
        witness.count("SELECT count(*) FROM orders WHERE id = ?", id)
        + witness.count("SELECT count(*) FROM effects WHERE order_id = ?", id)
        + witness.count("SELECT count(*) FROM outbox_table WHERE key = ?", f"order-{id}")
        + witness.count("SELECT count(*) FROM outbox_table_dead_letters WHERE key = ?", f"order-{id}")
        for id in rolled_back
    )
