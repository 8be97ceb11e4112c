"""Application: all that a run torments: services, each with a database, and what is between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Self, TypeVar

from tests.chaos.broker import Broker
from tests.chaos.database import Database
from tests.chaos.doorway import Doorway
from tests.chaos.evidence import FinalTables
from tests.chaos.processes import Home

EMPTY_FOR = 5.0  # seconds after which the queues of a broker are believed to be empty

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """A kind of database, and how many processes of each role use it."""

    database: type[Database]
    members: Mapping[str, int]
    listeners: str = "tests.chaos.listeners:listeners"
    books: tuple[str, ...] = ()  # in which it keeps balances
    takes_http: bool = False  # its workers are an application to which the other services' relays post


class Application:
    """Its databases, its broker or its doorway, and what they say together."""

    def __init__(self, services: Sequence[Service], disk_size: int, accounts: int, broker: type[Broker] | None) -> None:
        self._services = services
        self._accounts = accounts
        self.databases = [service.database(disk_size) for service in services]
        self.broker = broker() if broker else None
        self.doorway = Doorway() if any(service.takes_http for service in services) else None
        self.homes = [
            Home(database, self.broker, service.listeners, self.doorway, service.takes_http)
            for database, service in zip(self.databases, services, strict=True)
        ]
        self._stack = ExitStack()
        self._empty_since = time.monotonic()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for database, service in zip(self.databases, self._services, strict=True):
                stack.enter_context(database)
                if self._accounts:
                    database.open_books(service.books, self._accounts)
            if self.broker is not None:
                stack.enter_context(self.broker)
            if self.doorway is not None:
                stack.enter_context(self.doorway)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def why_no_disk_can_be_full(self) -> str:
        """Empty if every database has a disk of its own."""
        return next((database.disk.reason for database in self.databases if database.disk.reason), "")

    def answer_everything(self) -> None:
        """From here on no request over HTTP is left without an answer."""
        if self.doorway is not None:
            self.doorway.answer_everything()

    def waiting(self) -> int:
        """Messages that have not ended; what is on its way between a database and a broker is in neither."""
        count = sum(database.waiting() for database in self.databases)
        if self.broker is None:
            return count
        count += self.broker.waiting()
        if count:
            self._empty_since = time.monotonic()
        return count or int(time.monotonic() - self._empty_since < EMPTY_FOR)

    def effects(self, since: float = 0.0) -> int:
        """How many there are, from a moment on."""
        return sum(database.effects(since) for database in self.databases)

    def witness(self) -> None:
        """Note the order of what was committed, where relays keep it."""
        for database in self.databases:
            database.witness()

    def emitted(self) -> int:
        """Messages that were committed."""
        return sum(database.emitted() for database in self.databases)

    def open_sessions(self) -> int:
        """Connections of processes; what they have not committed could still happen."""
        return sum(database.open_sessions() for database in self.databases)

    def final_tables(self) -> FinalTables:
        """Everything that the checker wants to know."""
        each = [database.final_tables() for database in self.databases]
        waiting, buried = self.broker.final_queues() if self.broker is not None else ([], [])
        return FinalTables(
            orders=frozenset().union(*(tables.orders for tables in each)),
            effects=_joined(tables.effects for tables in each),
            waiting=(*_joined(tables.waiting for tables in each), *waiting),
            dead_letters=(*_joined(tables.dead_letters for tables in each), *buried),
            changes=_joined(tables.changes for tables in each),
            open_sessions=sum(tables.open_sessions for tables in each),
            at_least_once=self.broker is not None,
            balances=_joined(tables.balances for tables in each),
            asked=self.doorway.asked() if self.doorway is not None else (),
            fail_overs=_joined(tables.fail_overs for tables in each),
            commits=_joined(tables.commits for tables in each),
            delivered=self.broker.delivered() if self.broker is not None else (),
        )


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))
