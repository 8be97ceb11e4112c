"""Database: what the rig asks of a database. It asks directly; only the processes go through the proxy."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Self

from sqlalchemy import URL, Connection, NullPool, create_engine, func, insert, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from outbox import Outbox
from outbox.core.cloudevents import SOURCE
from outbox.testing.servers import PostgreSQL
from outbox.testing.servers.programs import account
from tests.chaos import tables
from tests.chaos.disk import Disk
from tests.chaos.evidence import Balance, Buried, Change, Effect, FinalTables
from tests.chaos.history import Emitted
from tests.support.proxy import Link, Proxy

DRIVERS = ("asyncpg", "psycopg")
MEBIBYTE = 1024 * 1024


class Database(ABC):
    """Where the application and its outbox live."""

    def __init__(self, disk_size: int) -> None:
        self.disk = Disk(disk_size)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.disk)
            self._start(stack)
            self._make_tables()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def _start(self, stack: ExitStack) -> None:
        """Have a database."""

    @property
    @abstractmethod
    def url(self) -> URL:
        """Where the rig itself asks, without an event loop."""

    @abstractmethod
    def url_for(self, number: int, link: Link | None) -> str:
        """Where the process with this number asks."""

    @abstractmethod
    def link(self, name: str) -> Link | None:
        """A way through the proxy for one process, where there is one."""

    def for_relays(self, link: Link | None) -> Mapping[str, str]:
        """Further variables for a relay's environment."""
        return {}

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.begin() as connection:
            yield connection

    def _make_tables(self) -> None:
        its_outbox = Outbox(db_engine_url=str(self.url), table_name=tables.TABLE_NAME)

        async def make() -> None:
            await its_outbox.create_tables()
            await its_outbox.close()

        asyncio.run(make())
        with self.connection() as connection:
            tables.metadata.create_all(connection)
            for statement in tables.TRIGGERS[self.url.get_backend_name()]:
                connection.exec_driver_sql(statement)

    def open_books(self, books: Sequence[str], accounts: int) -> None:
        """Balances of nothing yet."""
        rows = [
            {"book": book, "account": tables.account(number), "balance": 0}
            for book in books
            for number in range(accounts)
        ]
        with self.connection() as connection:
            connection.execute(insert(tables.balances), rows)

    # Looking.

    def waiting(self) -> int:
        """Messages that have not ended."""
        with self.connection() as connection:
            return connection.scalar(text(f"SELECT count(*) FROM {tables.TABLE_NAME}")) or 0

    def effects(self, since: float = 0.0) -> int:
        """How many there are, from a moment on."""
        recent = tables.effects.c.at > datetime.fromtimestamp(since, UTC)
        try:
            with self.connection() as connection:
                return connection.scalar(select(func.count()).select_from(tables.effects).where(recent)) or 0
        except SQLAlchemyError:
            return 0  # the database is away, by a fault that goes on

    def witness(self) -> None:  # noqa: B027 - most have nothing to note
        """Note the order of what was committed, where relays keep it."""

    def emitted(self) -> int:
        """Messages that were committed."""
        with self.connection() as connection:
            return connection.scalar(select(func.sum(tables.orders.c.messages))) or 0

    def open_sessions(self) -> int:
        """Connections of processes; what they have not committed could still happen."""
        return 0

    def final_tables(self) -> FinalTables:
        """Everything that the checker wants to know."""
        with self.connection() as connection:
            return FinalTables(
                orders=frozenset(connection.scalars(select(tables.orders.c.number))),
                effects=tuple(self._effects(connection)),
                waiting=tuple(self._waiting(connection)),
                dead_letters=asyncio.run(self._dead_letters()),
                changes=tuple(self._changes(connection)),
                open_sessions=self.open_sessions(),
                balances=tuple(self._balances(connection)),
            )

    def _effects(self, connection: Connection) -> Iterator[Effect]:
        for row in connection.execute(select(tables.effects)):
            yield Effect(row.message_id, row.queue, row.attempt, row.digest, _utc(row.at).timestamp())

    def _waiting(self, connection: Connection) -> Iterator[tuple[str, str]]:
        columns = "message_id, destination, tracking_ids, headers"
        for row in connection.execute(text(f"SELECT {columns} FROM {tables.TABLE_NAME}")):
            came_over_http = SOURCE in json.loads(row.headers or "{}")
            yield json.loads(row.tracking_ids)[-1] if came_over_http else row.message_id, row.destination

    def _balances(self, connection: Connection) -> Iterator[Balance]:
        for row in connection.execute(select(tables.balances)):
            yield Balance(row.book, row.account, row.balance)

    async def _dead_letters(self) -> tuple[Buried, ...]:
        """As the library itself shows them."""
        its_outbox = Outbox(db_engine_url=str(self.url), table_name=tables.TABLE_NAME)
        letters = await its_outbox.dead_letters.list(limit=1_000_000)
        await its_outbox.close()
        return tuple(
            Buried(
                message=Emitted.of(letter.message),
                queue=letter.queue or "",
                reason=letter.reason,
                attempts=letter.attempt_count,
                crashes=letter.crash_count,
                history=letter.history,
            )
            for letter in letters
        )

    def _changes(self, connection: Connection) -> Iterator[Change]:
        for row in connection.execute(select(tables.changes).order_by(tables.changes.c.id)):
            yield Change(
                application=row.application,
                statement_at=_utc(row.statement_at),
                at=_utc(row.at),
                deleted=row.deleted,
                row=row.row_id,
                message_id=row.message_id,
                queue=row.queue,
                old_token=row.old_token and row.old_token.hex,
                old_until=row.old_until and _utc(row.old_until),
                new_token=row.new_token and row.new_token.hex,
                attempts=row.attempts,
            )


class RecoveringPostgreSQL(PostgreSQL):
    """May give up by itself, and be started again."""

    def came_to_an_end(self) -> bool:
        """Whether it gave up by itself; if so it can be started again."""
        if self._process is None or self._process.poll() is None:
            return False
        self._wait_until_gone(self._process)
        return True


class _ServerOnDisk(RecoveringPostgreSQL):
    """Keeps its data on a disk that may be full."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(settings={"max_wal_size": "96MB", "min_wal_size": "32MB"})  # a small disk has to last
        self._disk = disk

    def _prepare(self) -> None:
        data = self._disk.folder / "data"
        data.mkdir(mode=0o700)
        account().owns(data)
        (self.folder / "data").symlink_to(data)
        super()._prepare()


class ServerDatabase(Database):
    """A private server, so it may be crashed, with a proxy before it."""

    @abstractmethod
    def crash(self) -> None:
        """Kill the server with all its processes."""

    @abstractmethod
    def stop(self) -> None:
        """End it in good order; sessions are ended too."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and recover."""

    @abstractmethod
    def recover(self) -> None:
        """Start it again if it gave up by itself."""

    @abstractmethod
    def terminate_backends(self, share: float) -> int:
        """End some sessions from the server's side; how many."""


class PostgresqlDatabase(ServerDatabase):
    """A private server, so it may be crashed, with a proxy before it."""

    _server: RecoveringPostgreSQL

    def _start(self, stack: ExitStack) -> None:
        self._server = stack.enter_context(_ServerOnDisk(self.disk))
        self._proxy = stack.enter_context(Proxy())

    @property
    def url(self) -> URL:
        return make_url(self._server.url).set(drivername="postgresql+psycopg")

    def url_for(self, number: int, link: Link | None) -> str:
        assert link is not None
        url = self.url.set(drivername=f"postgresql+{DRIVERS[number % len(DRIVERS)]}", port=link.port)
        return url.render_as_string(hide_password=False)

    def link(self, name: str) -> Link:
        return self._proxy.link(name, self._server.port)

    def crash(self) -> None:
        """Kill the server with all its processes."""
        self._server.kill()

    def stop(self) -> None:
        """End it in good order; sessions are ended too."""
        self._server.stop("fast")

    def start(self) -> None:
        """Start it, and recover."""
        self._server.start()

    def recover(self) -> None:
        """Start it again if it gave up by itself."""
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._server.came_to_an_end():
                self._server.start()
            elif time.monotonic() > deadline:
                raise TimeoutError("PostgreSQL does not answer, and did not end either")
            time.sleep(0.1)

    def terminate_backends(self, share: float) -> int:
        """End some sessions from the server's side; how many."""
        statement = text(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < :share"
        )
        with self.connection() as connection:
            return connection.scalar(statement, {"share": share}) or 0

    def open_sessions(self) -> int:
        statement = text(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND application_name ~ '^[a-z]+-'"
        )
        with self.connection() as connection:
            return connection.scalar(statement) or 0

    def _answers(self) -> bool:
        try:
            with self.connection() as connection:
                return connection.scalar(text("SELECT 1")) == 1
        except Exception:  # noqa: BLE001 - drivers throw what they like
            return False


class SqliteDatabase(Database):
    """A file."""

    def _start(self, stack: ExitStack) -> None:
        self._file = self.disk.folder / "chaos.db"

    @property
    def url(self) -> URL:
        return make_url(f"sqlite:///{self._file}")

    def url_for(self, number: int, link: Link | None) -> str:
        return f"sqlite+aiosqlite:///{self._file}"

    def link(self, name: str) -> None:
        return None


def _utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
