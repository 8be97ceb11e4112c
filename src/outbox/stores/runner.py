"""Runner: runs statements on connections of the store's own, to their end whatever happens to the caller."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Executable, Pool, event
from sqlalchemy.exc import InvalidatePoolError

from outbox.core.forks import forget_after_fork, lead_nowhere
from outbox.core.loops import finish
from outbox.stores.dialect import SqlDialect
from outbox.stores.tables import Tables

# Sockets: those of our own connections, which a forked child must not speak over.
# Two processes on one socket mix up their transactions. In a child each of them leads nowhere from the beginning, also
# for a session that was open when the process forked: its next statement fails instead of reaching the parent's
# transaction. The server sees the end of the connection when the parent ends it.


class _Connections:
    """All connections of our own in this process."""

    def __init__(self) -> None:
        self._records: WeakSet[Any] = WeakSet()

    def add(self, connection: Any, record: Any) -> None:
        self._records.add(record)

    def forked(self) -> None:
        for record in list(self._records):
            with suppress(Exception):  # it is closed
                lead_nowhere(descriptor(record.driver_connection))


_connections = _Connections()
forget_after_fork(_connections)


def cut_in_children(connecting: Engine | Pool) -> None:
    """Let connections of our own lead nowhere in forked children."""
    event.listen(connecting, "connect", _connections.add)


def descriptor(driver_connection: Any) -> int:
    """The number of a connection's socket. asyncpg's can be had from its transport only."""
    if hasattr(driver_connection, "fileno"):
        number: int = driver_connection.fileno()
    else:
        number = driver_connection._transport.get_extra_info("socket").fileno()
    return number


# Idle: a connection about which there is doubt is asked whether it still leads anywhere, before it is given out.
# SQLAlchemy would ask each time, and a question takes as long as the transaction that it precedes. A server that goes
# away closes its connections, which can be seen here without asking: there is something to read where no answer was
# asked.

LONGEST_TRUST = 10.0  # seconds since it was last used after which something on the way may have forgotten it

_USED_AT = "outbox used at"


def ask_the_doubtful(engine: Engine) -> None:
    """Let the engine's pool replace connections that have died, all of them when one is found."""

    def given_back(connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    def given_out(connection: Any, record: Any, proxy: Any) -> None:
        used_at = record.info.get(_USED_AT)  # none: it was just made
        is_spare = proxy._pool is not engine.pool  # pools that are made like this one have its events
        if used_at is None or is_spare:
            return
        if time.monotonic() - used_at < LONGEST_TRUST and _is_quiet(record.driver_connection):
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", given_back)
    event.listen(engine, "checkout", given_out)


def _is_quiet(driver_connection: Any) -> bool:
    """Whether nothing came since the last answer: neither the end nor anything else."""
    with suppress(Exception):  # a closed one has no number any more, in each driver's own words
        waiting = select.poll()
        waiting.register(descriptor(driver_connection), select.POLLIN)
        return not waiting.poll(0)
    return False


def spare(engine: Engine) -> Engine:
    """An engine that connects exactly as the given one, beside its pool: a full pool cannot block it."""
    pool = engine.pool.recreate()
    # No pre-ping: callers retry.
    pool._pre_ping = False
    cut_in_children(pool)
    return Engine(pool, engine.dialect, engine.url, hide_parameters=engine.hide_parameters)


Result = TypeVar("Result")

WORK_WITHIN = 40.0  # seconds for a statement of ours: longer than SQLite waits for its turn, shorter than a lease
LOOK_WITHIN = 300.0  # seconds for looking, which may have to count millions


class Runner(ABC):
    """How work reaches a database. Work is a function of a plain connection.

    Where transactions conflict, it runs again: what it changes outside of the database it begins anew each time.
    """

    writes_side_by_side: ClassVar[bool] = True  # whether two transactions can write at the same time

    def __init__(self, tables: Tables, dialect: SqlDialect) -> None:
        self._tables = tables
        self._dialect = dialect
        self._ready = False

    # How a database does it.

    @abstractmethod
    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work on a connection of the store's own, in one transaction."""

    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together: one round trip each where the database can."""
        return await self._transact(work)

    async def _renew(self, work: Callable[[Connection], Result]) -> Result:
        """Run what renews leases. Where one writes at a time, it comes first."""
        return await self._apply(work)

    @abstractmethod
    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""

    async def _survey(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, and sees one moment however many statements it takes."""
        return await self._look(work)

    async def _inspect(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, on a connection that leaves everything as it finds it."""
        return await self._look(work)

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""

    def turn(self, *, for_caller: bool = False) -> AbstractAsyncContextManager[None]:
        """Held around a transaction of a listener or a caller, where the database lets only one write at a time."""
        return nullcontext()

    # On tables that exist.

    async def open(self) -> None:
        """Get ready; tables are made if they are missing."""
        if not self._ready and await self.has_tables():
            self._ready = True
        if not self._ready:
            await self.create_tables()

    async def create_tables(self) -> None:
        await finish(self._transact(lambda connection: self._dialect.create(connection, self._tables)), WORK_WITHIN)
        self._ready = True

    async def has_tables(self) -> bool:
        """Whether the tables are there. Looking does not make them, and waits for no writer."""
        return not await finish(
            self._look(lambda connection: self._dialect.missing(connection, self._tables)), WORK_WITHIN
        )

    async def transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work in one transaction."""
        await self.open()
        return await finish(self._transact(work), WORK_WITHIN)

    async def apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work whose statements need not commit together."""
        await self.open()
        return await finish(self._apply(work), WORK_WITHIN)

    async def renew(self, work: Callable[[Connection], Result]) -> Result:
        """Run what renews leases, before anything else that waits to write."""
        await self.open()
        return await finish(self._renew(work), WORK_WITHIN)

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads."""
        await self.open()
        return await finish(self._look(work), LOOK_WITHIN)

    async def survey(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads: a message that moves meanwhile is seen in one place."""
        await self.open()
        return await finish(self._survey(work), LOOK_WITHIN)

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The few rows of a question that is asked again and again while nothing happens."""
        return await self.look(lambda connection: connection.execute(statement, parameters).all())

    async def inspect(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, on whatever is there: no table is made for it."""
        return await finish(self._inspect(work), WORK_WITHIN)
