"""Evidence: what databases, brokers and relays' requests tell when a run is over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tests.chaos.history import Emitted

Place = tuple[str, str]  # a message's id and a queue


@dataclass(frozen=True)
class Effect:
    """What a listener wrote through its session."""

    message_id: str
    queue: str
    attempt: int
    digest: str  # of the message that the listener saw
    at: float = 0.0


@dataclass(frozen=True)
class Buried:
    """A dead letter."""

    message: Emitted
    queue: str
    reason: str
    attempts: int
    crashes: int
    history: str = ""


@dataclass(frozen=True)
class Change:
    """An update or deletion of a message's row, as a trigger saw it. A deletion has no new token."""

    application: str | None  # the process whose connection it was, where the database knows
    statement_at: datetime  # when the statement began, by the database's clock
    at: datetime  # when the row had been changed
    deleted: bool
    row: int
    message_id: str
    queue: str  # before the change
    old_token: str | None
    old_until: datetime | None
    new_token: str | None
    attempts: int = 0  # that had failed before the change


@dataclass(frozen=True)
class Asked:
    """A request that a relay sent over HTTP, as somebody on the way saw it."""

    relay: str
    message_id: str
    began: float
    ended: float
    status: int | None  # none: the relay heard nothing

    @property
    def is_taken(self) -> bool:
        return self.status is not None and 200 <= self.status <= 299


@dataclass(frozen=True)
class Balance:
    """What one book says of an account."""

    book: str
    account: str
    balance: int


@dataclass(frozen=True)
class FailOver:
    """A primary that was killed, and what it had committed that the standby in its place did not have."""

    killed_at: float
    promoted_at: float  # from then on processes reached the new primary
    is_synchronous: bool
    vanished_orders: frozenset[str] = frozenset()  # numbers of transactions
    vanished_effects: frozenset[Place] = frozenset()
    kept_messages: frozenset[str] = frozenset()  # ids of those that the standby knew when it was promoted


@dataclass(frozen=True)
class FinalTables:
    """What the databases held in the end."""

    orders: frozenset[str] = frozenset()
    effects: tuple[Effect, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()  # message ids and queues
    dead_letters: tuple[Buried, ...] = ()
    changes: tuple[Change, ...] = ()  # in the order in which they happened to each row
    open_sessions: int = 0  # of processes that should be gone
    at_least_once: bool = False  # a broker may deliver a message twice, and then it may have two dead letters
    balances: tuple[Balance, ...] = ()
    asked: tuple[Asked, ...] = ()  # over HTTP, in the order in which it ended
    fail_overs: tuple[FailOver, ...] = ()
    commits: tuple[str, ...] = ()  # numbers of transactions in the order of the log, where relays read it
    delivered: tuple[str, ...] = ()  # message ids in the order in which the broker took them, where relays read the log
