"""Parts: what one setup() makes, each part when it is first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection

from outbox.adapters import defaults_of, is_same_database, parse_url, routes_for, store_class, transport_for
from outbox.core.dead_letter import AllDeadLetters, DeadLetters
from outbox.core.errors import ConfigurationError, TransactionError
from outbox.core.forks import never_collect
from outbox.core.kept_property import kept_property
from outbox.core.listener import Listener
from outbox.core.log import LogAdministration, LogOptions, LogReader, LogStore
from outbox.core.store import IN_DATABASE, Backlog, Locatable, Store, ThreadNotifying
from outbox.core.transport import Transport, countable
from outbox.engines import Engines
from outbox.inbound.inbox import Memory
from outbox.inbound.receiver import Receiver
from outbox.observers.logging import LoggingObserver, Observers
from outbox.outbound.emitter import Emitter
from outbox.owners import Owners, recorded_queues
from outbox.settings import Settings
from outbox.stores.tables import Tables

if TYPE_CHECKING:  # what an application that only emits never needs is imported where it is made
    from outbox.inbound.http.intake import Intake
    from outbox.inbound.http.options import HttpAppOptions
    from outbox.relay_factory import RelayFactory
    from outbox.transports.database import DatabaseTransport
    from outbox.worker_factory import WorkerFactory


class Stores(dict[str, Store]):
    """The stores for callers' databases, by the names of their dialects, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Store]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, dialect: str) -> Store:
        # Several threads may be first. What all but one of them make has no connection and sends no wake-ups.
        return self.setdefault(dialect, self._make(dialect))


class Parts:
    """Everything that depends on the settings. The next setup() replaces all of it, so none can be left from before."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stores = Stores(self._make_store)

    @classmethod
    def from_environment(cls) -> Parts:
        """Those of an outbox without a setup(), if the environment says where messages are or go."""
        settings = Settings.of({})
        if settings.db_engine_url is None and settings.transport is None and not settings.routes:
            raise ConfigurationError("not set up: call setup(db_engine_url=…) or set OUTBOX_DB_ENGINE_URL")
        return cls(settings)

    @kept_property
    def tables(self) -> Tables:
        dialect = self.engines.dialect
        named = Tables.named if dialect is None else store_class(dialect).tables_named
        tables: Tables = named(*self._names)
        return tables

    @property
    def _names(self) -> tuple[str, str | None]:
        return self.settings.table_name, self.settings.schema

    @kept_property
    def engines(self) -> Engines:
        return Engines(self.settings)

    @kept_property
    def store(self) -> Store:
        """The store of the configured database."""
        return self.stores[self.engines.main.dialect.name]

    def _make_store(self, dialect: str) -> Store:
        self.engines.check_dialect(dialect)
        for known in list(self.stores):
            if is_same_database(known, dialect):
                return self.stores[known]
        engine = self.engines.asynchronous_if(dialect)
        made = store_class(dialect)
        tables = self.tables if self.engines.configured else made.tables_named(*self._names)
        store = made(tables, engine, self.settings.clean_up_after)
        plain = self.engines.plain_if(dialect)
        if plain is not None and isinstance(store, Locatable):
            store.locate(plain)
        if isinstance(store, ThreadNotifying):
            store.notifies_in_thread = self.settings.sync_wakeups
        return store

    def aborted(self, connection: Connection) -> TransactionError | None:
        """Why the database would keep nothing of a transaction; of one that is not known here nothing can be said."""
        with suppress(ConfigurationError):
            return self.stores[connection.dialect.name].transactions.aborted(connection)
        return None

    @kept_property
    def transport(self) -> Transport:
        """The configured transport; none means the database."""
        if self.on_database:
            return self.database_transport()
        settings = self.settings
        defaults = defaults_of(settings, self.observe)
        return routes_for(settings.routes, defaults) if settings.routes else transport_for(settings.transport, defaults)

    @property
    def on_database(self) -> bool:
        return not self.settings.routes and self.settings.transport in (None, IN_DATABASE)

    def database_transport(self, *, binds: bool = True) -> DatabaseTransport:
        from outbox.transports.database import DatabaseTransport

        settings = self.settings
        return DatabaseTransport(
            self.store,
            lease=settings.duration("lease"),
            poll_interval=settings.seconds_between_looks,
            observe=self.observe,
            binds=binds,
        )

    def forget_transport(self) -> None:
        """Make another one when it is needed next: this one's event loop was closed before it was."""
        self.__dict__.pop("transport", None)

    @kept_property
    def observe(self) -> Observers:
        observers = self.settings.observers or ()
        logged = not self.settings.log or any(isinstance(observer, LoggingObserver) for observer in observers)
        return Observers(observers if logged else [LoggingObserver(), *observers])

    @kept_property
    def emitter(self) -> Emitter:
        settings = self.settings
        return Emitter(
            self.stores,
            expiration=None if settings.expiration is None else settings.duration("expiration"),
            max_body_size=settings.max_body_size,
            observe=self.observe,
        )

    @kept_property
    def receiver(self) -> Receiver:
        return Receiver(self.stores, self.memory, max_body_size=self.settings.max_body_size, observe=self.observe)

    @kept_property
    def memory(self) -> Memory:
        return Memory(self.settings.inbox_retention)

    @property
    def owners(self) -> Owners:
        """Whose queues are recorded in the database."""
        return Owners(self.store, self.settings, self.observe)

    @property
    def relays(self) -> RelayFactory:
        from outbox.relay_factory import RelayFactory

        return RelayFactory(self.store, self.settings, self.observe)

    @property
    def from_log(self) -> bool:
        """Whether a relay has its messages from the database's log."""
        return self.settings.relay_from == "wal"

    @property
    def log_url(self) -> URL:
        """Where the log is read."""
        if self.settings.wal_url is not None:
            return parse_url(self.settings.wal_url)
        return self.engines.main.url

    @kept_property
    def log_store(self) -> LogStore:
        """The store, if its database has a log that can be read."""
        if not isinstance(self.store, LogStore):
            raise ConfigurationError(
                "relay_from='wal' reads PostgreSQL's write-ahead log, and this is another database"
            )
        return self.store

    def log_administration(self) -> LogAdministration:
        """The slot of this outbox."""
        return self.log_store.log_administration(self.log_url, self.settings.wal_slot)

    def log_reader(self, transport: Transport, *, feeds: bool) -> LogReader:
        """What one process reads the log by."""
        from outbox.outbound.relay import STUCK

        settings = self.settings
        options = LogOptions(
            feeds=feeds,
            url=self.log_url,
            slot=settings.wal_slot,
            poll_interval=settings.seconds_between_looks,
            slot_in_use_delay=settings.duration("slot_in_use_delay").total_seconds(),
            restart_delay=settings.restart_delay,
            # Where each message has its own answer, they are sent side by side, and one may hang for long.
            patience=STUCK if transport.features.reports_answers else None,
        )
        return self.log_store.log_reader(options, self.observe)

    @property
    def workers(self) -> WorkerFactory:
        from outbox.worker_factory import WorkerFactory

        return WorkerFactory(
            self.store if self.engines.configured else None,
            self.engines,
            self.transport,
            self.settings,
            self.memory,
            self.database_transport,
            self.observe,
        )

    def intake(self, listeners: Sequence[Listener], options: HttpAppOptions, store: Callable[[], Store]) -> Intake:
        """What takes requests for listeners."""
        from outbox.inbound.http.intake import Intake

        return Intake(
            listeners,
            options,
            store,
            self.memory,
            unroutable=self.settings.unroutable,
            batch_size=self.settings.batch_size,
            observe=self.observe,
        )

    @property
    def dead_letters(self) -> DeadLetters:
        """Those of the relay, and those of the transport's queues where it keeps them."""
        of_queues = self.transport.dead_letters
        if of_queues is None:
            return self.store.dead_letters
        if not self.engines.configured or of_queues is self.store.dead_letters:
            return of_queues
        return AllDeadLetters(self.store.dead_letters, of_queues)

    async def backlog(self) -> Backlog:
        """What the database counts, and beside it what the queues of a broker hold."""
        backlog, transport = await self.store.inspection.backlog(), self.transport
        elsewhere = countable(transport)
        if not elsewhere:
            return backlog
        # What is recorded beside routes are their names.
        recorded = () if transport.routes else await recorded_queues(self.store)
        counts = await asyncio.gather(*(each.counted(recorded) for each in elsewhere))
        backlog = backlog.beside([queue for queues in counts for queue in queues or ()])
        return backlog.beside(None) if None in counts else backlog

    async def close(self) -> None:
        """Let go of this event loop's connections; the next use makes new ones. Given engines stay as they are."""
        for store in self.stores.values():
            await store.close()
        if "engines" in self.__dict__:
            await self.engines.close()

    def forked(self) -> None:
        """In a child process: forget what is the parent's, its connections and threads above all."""
        never_collect([self.__dict__.pop("store", None), self.__dict__.pop("transport", None), dict(self.stores)])
        self.stores.clear()
        if "engines" in self.__dict__:
            self.engines.forked()
