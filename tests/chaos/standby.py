"""Standby: a PostgreSQL that follows another one, and takes over when that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from sqlalchemy import Connection, NullPool, create_engine, make_url, select, text

from outbox.testing.servers import PostgreSQL
from outbox.testing.servers.programs import account
from tests.chaos import tables
from tests.chaos.database import PostgresqlDatabase, RecoveringPostgreSQL
from tests.chaos.evidence import FailOver, FinalTables, Place
from tests.support.proxy import Link, Proxy

STANDBY = "standby"  # the name by which a primary knows it
FOLLOWS_WITHIN = 120.0  # seconds
LOOK_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class _Contents:
    """What a server knows of the application."""

    orders: frozenset[str]
    effects: frozenset[Place]
    messages: frozenset[str]  # ids of those that wait or had an effect

    @classmethod
    def of(cls, connection: Connection) -> Self:
        orders = frozenset(connection.scalars(select(tables.orders.c.number)))
        columns = tables.effects.c.message_id, tables.effects.c.queue
        effects = frozenset((message_id, queue) for message_id, queue in connection.execute(select(*columns)))
        waiting = connection.scalars(text(f"SELECT message_id FROM {tables.TABLE_NAME}"))
        return cls(orders, effects, frozenset(waiting) | {message_id for message_id, _ in effects})


@contextmanager
def _snapshot(server: PostgreSQL) -> Iterator[Connection]:
    """A connection that sees what there is now, and nothing that comes later."""
    url = make_url(server.url).set(drivername="postgresql+psycopg")
    engine = create_engine(url, poolclass=NullPool, isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        yield connection


class Twin(RecoveringPostgreSQL):
    """A primary; or a copy of one, which follows it over a link of the proxy until it is promoted."""

    def __init__(
        self, settings: Mapping[str, str], link: Link | None = None, primary: PostgreSQL | None = None
    ) -> None:
        followed = {"primary_conninfo": f"host=127.0.0.1 port={link.port} user=outbox dbname=postgres"} if link else {}
        super().__init__(settings={"wal_keep_size": "2GB", **settings, **followed})
        self._primary = primary

    def _prepare(self) -> None:
        if self._primary is None:
            super()._prepare()
            return
        source = ["-h", "127.0.0.1", "-p", f"{self._primary.port}", "-U", "outbox"]
        how = ["-D", "data", "-X", "stream", "-c", "fast", "--no-sync"]
        self.programs.run(["pg_basebackup", *source, *how], folder=self.folder)
        signal = self.folder / "data/standby.signal"
        signal.touch()
        account().owns(signal)

    def _is_ready(self, process_id: int) -> bool:
        lines = self._lock_file()
        return lines[:1] == [str(process_id)] and lines[7:8] in (["ready"], ["standby"])


class PostgresqlPair(PostgresqlDatabase):
    """A primary and a standby, which a commit waits for. All processes reach the primary of the moment."""

    is_synchronous: ClassVar[bool] = True

    def _start(self, stack: ExitStack) -> None:
        self._proxy = stack.enter_context(Proxy())
        self._servers = stack.enter_context(ExitStack())
        self._links: list[Link] = []
        self._fail_overs: list[FailOver] = []
        self._replication = self._proxy.link(STANDBY)
        self._server = self._servers.enter_context(Twin(self._settings))
        self._standby = self._follower()

    @property
    def _settings(self) -> Mapping[str, str]:
        return {"synchronous_standby_names": STANDBY, "synchronous_commit": "on"} if self.is_synchronous else {}

    def link(self, name: str) -> Link:
        link = super().link(name)
        self._links.append(link)
        return link

    def final_tables(self) -> FinalTables:
        return replace(super().final_tables(), fail_overs=tuple(self._fail_overs))

    def hold_back(self) -> None:
        """From now on the standby gets nothing."""
        self._replication.swallow()

    def fail_over(self) -> None:
        """Kill the primary, and let the standby take over with what it has; then there is another standby."""
        dead, promoted = self._server, self._standby
        killed_at = time.time()
        dead.kill()
        with _snapshot(promoted) as connection:
            connection.execute(text("SELECT pg_promote()"))
        self._replication.heal()
        with _snapshot(promoted) as connection:  # of what it has before a process writes there
            self._server = promoted
            for link in self._links:
                link.server_ports = (promoted.port,)
            promoted_at = time.time()
            kept = _Contents.of(connection)
        dead.start()  # to be asked what it had; no process is led there any more
        with _snapshot(dead) as connection:
            had = _Contents.of(connection)
        dead.close()
        self._standby = self._follower()
        self._fail_overs.append(
            FailOver(
                killed_at=killed_at,
                promoted_at=promoted_at,
                is_synchronous=self.is_synchronous,
                vanished_orders=had.orders - kept.orders,
                vanished_effects=had.effects - kept.effects,
                kept_messages=kept.messages,
            )
        )

    def _follower(self) -> Twin:
        """A new standby of the primary of the moment, once it follows."""
        self._replication.server_ports = (self._server.port,)
        standby = self._servers.enter_context(Twin(self._settings, self._replication, self._server))
        deadline = time.monotonic() + FOLLOWS_WITHIN
        while not self._is_followed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the standby does not follow after {FOLLOWS_WITHIN:g} s")
            time.sleep(LOOK_EVERY)
        return standby

    def _is_followed(self) -> bool:
        statement = text("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = :state")
        with self.connection() as connection:
            return bool(connection.scalar(statement, {"state": "sync" if self.is_synchronous else "async"}))


class LaggingPair(PostgresqlPair):
    """The same, but no commit waits for the standby."""

    is_synchronous = False
