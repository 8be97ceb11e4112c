"""Model: what a store must do, in dictionaries.

Times are facts here, not instants: a message is due or it is not, a lease is long, short or over. The machine turns
one into the other by writing times that are hours away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outbox import Message
from outbox.core.attempt import Dead, Done, Outcome, Reason, Released, RetryIn

Key = tuple[str, str | None]  # the message's id and the queue that has it; none: it is not routed

LONG, SHORT = "long", "short"
LATER, PAST = "later", "past"
UNTRIED = (Reason.EXPIRED, Reason.CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A message in one place."""

    message: Message
    state: str = "open"  # or sent, or dead
    unroutable: bool = False
    attempts: int = 0
    crashes: int = 0
    lines: int = 0  # of its history
    is_due: bool = True
    lease: str | None = None
    expiration: str | None = None
    timer_id: str | None = None
    reason: Reason | None = None
    error: str | None = None
    is_old: bool = False  # done long ago
    holder: int | None = field(default=None, compare=False)  # the claim whose token it bears, valid or not


@dataclass(slots=True)
class Changes:
    """What a transaction has done so far and nobody else sees."""

    stored: dict[Key, Row] = field(default_factory=dict)
    deleted: set[Key] = field(default_factory=set)

    def copy(self) -> Changes:
        return Changes(dict(self.stored), set(self.deleted))


@dataclass(slots=True)
class Transaction:
    """A transaction and the savepoints that are open in it."""

    levels: list[Changes] = field(default_factory=lambda: [Changes()])
    timer_ids: set[str] = field(default_factory=set)  # whoever else touched one of these would wait

    @property
    def changes(self) -> Changes:
        return self.levels[-1]


class Model:
    """Every message where it must be."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.rows: dict[Key, Row] = {}
        self.bindings: set[tuple[str, str]] = set()
        self.transactions: dict[int, Transaction] = {}
        self.inbox: set[tuple[str, str]] = set()

    def copy(self) -> Model:
        """A second one, to see what something would do. Transactions are left out."""
        other = Model(keeps=self.keeps)
        other.rows, other.bindings = dict(self.rows), set(self.bindings)
        other.transactions = self.transactions
        return other

    # Transactions.

    def store(self, transaction: Transaction, row: Row) -> bool:
        """Whether it was stored: a timer that waits already is not."""
        if row.timer_id is not None:
            transaction.timer_ids.add(row.timer_id)
            if self._timer(transaction, row.timer_id) is not None:
                return False
        transaction.changes.stored[row.message.id, None] = row
        return True

    def cancel_timer(self, transaction: Transaction, timer_id: str) -> bool:
        transaction.timer_ids.add(timer_id)
        key = self._timer(transaction, timer_id)
        if key is None or (key in self.rows and self.rows[key].lease):
            return False
        if transaction.changes.stored.pop(key, None) is None:
            transaction.changes.deleted.add(key)
        return True

    def _timer(self, transaction: Transaction, timer_id: str) -> Key | None:
        seen = {key: row for key, row in self.rows.items() if key not in transaction.changes.deleted}
        seen |= transaction.changes.stored
        waiting = [k for k, row in seen.items() if row.timer_id == timer_id and k[1] is None and row.state == "open"]
        assert len(waiting) <= 1
        return waiting[0] if waiting else None

    def savepoint(self, transaction: Transaction) -> None:
        transaction.levels.append(transaction.changes.copy())

    def end_savepoint(self, transaction: Transaction, *, keep: bool) -> None:
        top = transaction.levels.pop()
        if keep:
            transaction.levels[-1] = top

    def end(self, number: int, *, commit: bool) -> None:
        transaction = self.transactions.pop(number)
        if commit:
            changes = transaction.changes
            self.rows = {k: row for k, row in self.rows.items() if k not in changes.deleted} | changes.stored

    @property
    def locked(self) -> set[Key]:
        """Rows that some open transaction holds: everybody else passes them by."""
        return {key for each in self.transactions.values() for key in each.changes.deleted}

    # Routing.

    def queues(self, routing_key: str) -> list[str]:
        words = routing_key.split(".")
        return sorted({queue for queue, pattern in self.bindings if fits(pattern.split("."), words)})

    def bind(self, queue: str, pattern: str) -> None:
        if (queue, pattern) not in self.bindings:
            self.bindings.add((queue, pattern))
            for key, row in self.rows.items():
                if row.unroutable and key not in self.locked:
                    self.rows[key] = replace(row, is_due=True, attempts=0)

    def unbind(self, queue: str) -> int:
        gone = {each for each in self.bindings if each[0] == queue}
        self.bindings -= gone
        return len(gone)

    def route(self, keys: Iterable[Key], discards: Iterable[str]) -> None:
        for key in keys:
            row = self.rows.pop(key)
            queues = self.queues(row.message.routing_key)
            fresh = replace(row, unroutable=False, attempts=0, crashes=0, holder=None)
            for queue in queues:
                self.rows[key[0], queue] = fresh
            if not queues and row.message.routing_key not in discards:
                lines = max(row.lines, 1)
                self.rows[key] = replace(row, unroutable=True, is_due=False, attempts=row.attempts + 1, lines=lines)

    # Claiming.

    def due(self, queue: str | None) -> list[Key]:
        """What a claim or a router can take now."""
        return [
            key
            for key, row in self.rows.items()
            if key[1] == queue and row.state == "open" and row.is_due and not row.lease and key not in self.locked
        ]

    def claim(self, number: int, keys: Iterable[Key]) -> None:
        for key in keys:
            self.rows[key] = replace(self.rows[key], lease=LONG, holder=number)
            if self.rows[key].expiration == PAST:
                self._end(key, Dead(Reason.EXPIRED))

    def holds(self, number: int, key: Key) -> bool:
        row = self.rows.get(key)
        return row is not None and row.holder == number and row.lease is not None

    def settle(self, number: int, outcomes: Mapping[Key, Outcome]) -> set[Key]:
        """Which were lost."""
        lost = {key for key in outcomes if not self.holds(number, key)}
        for key in outcomes:
            if key not in lost:
                self._end(key, outcomes[key])
        return lost

    def _end(self, key: Key, outcome: Outcome) -> None:
        row = replace(self.rows.pop(key), lease=None, holder=None)
        match outcome:
            case Done():
                if self.keeps:
                    self.rows[key] = replace(row, state="sent", attempts=row.attempts + 1)
            case RetryIn(delay, _):
                again = replace(row, attempts=row.attempts + 1, lines=row.lines + 1, is_due=not delay)
                self.rows[key] = again
            case Dead(reason, error):
                self.rows[key] = self._dead(
                    replace(row, attempts=row.attempts + (reason not in UNTRIED)), reason, error
                )
            case Released(delay):
                self.rows[key] = replace(row, is_due=row.is_due and not delay)

    def renew(self, number: int, keys: Iterable[Key]) -> None:
        for key in keys:
            if self.holds(number, key):
                self.rows[key] = replace(self.rows[key], lease=LONG)

    # Dead letters and cleaning up.

    def replay(self, keys: Sequence[Key]) -> None:
        for key in keys:
            row = self.rows[key]
            self.rows[key] = Row(message=row.message, lines=row.lines + 1)

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            del self.rows[key]

    def expirable(self) -> list[Key]:
        return [
            key
            for key, row in self.rows.items()
            if row.state == "open" and row.expiration == PAST and not row.lease and key not in self.locked
        ]

    def expire(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.rows[key] = self._dead(self.rows[key], Reason.EXPIRED, "")

    def _dead(self, row: Row, reason: Reason, error: str) -> Row:
        """A dead letter keeps the message and the counts; of what it once waited for it tells nothing."""
        return Row(
            message=row.message,
            state="dead",
            attempts=row.attempts,
            crashes=row.crashes,
            lines=row.lines + 1,
            expiration=row.expiration,
            reason=reason,
            error=error,
        )

    # Time.

    def pass_time(self, key: Key, what: str) -> None:
        """Something of a row's is over."""
        row = self.rows[key]
        after = {
            "delay": replace(row, is_due=True),
            "lease": replace(row, lease=None, crashes=row.crashes + 1),
            "part of lease": replace(row, lease=SHORT),
            "expiration": replace(row, expiration=PAST),
            "retention": replace(row, is_old=True),
        }
        self.rows[key] = after[what]

    def can_pass(self, what: str) -> list[Key]:
        """The rows of which that can still be over."""
        can = {
            "delay": lambda row: row.state == "open" and not row.is_due,
            "lease": lambda row: row.lease is not None,
            "part of lease": lambda row: row.lease == LONG,
            "expiration": lambda row: row.state == "open" and row.expiration == LATER,
            "retention": lambda row: row.state == "sent" and not row.is_old,
        }
        return [key for key, row in self.rows.items() if can[what](row) and key not in self.locked]

    # Doubt.

    def agree(self, happened: Model, observed: Mapping[Key, Row]) -> None:
        """Each message must be as it was or as it should be; afterwards this model is as the store is."""
        for message_id in dict.fromkeys(key[0] for key in (*self.rows, *happened.rows)):
            before, after, seen = (
                {key: row for key, row in rows.items() if key[0] == message_id}
                for rows in (self.rows, happened.rows, observed)
            )
            assert seen in (before, after), f"neither {before} nor {after}, but {seen}"
            if seen != before:
                self.remove(before)
                self.rows |= after


def fits(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """A topic exchange's rule, told by recursion."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(fits(pattern[1:], words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and fits(pattern[1:], words[1:])
