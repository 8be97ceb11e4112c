"""Outbox: one configured instance. Wires the parts and delegates to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

from sqlalchemy import Connection, MetaData
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.adapters import routes_for, store_class, transport_for
from outbox.background import in_background
from outbox.core.binding import Binding
from outbox.core.dead_letter import AllDeadLetters, DeadLetters
from outbox.core.durations import Eta, Seconds
from outbox.core.errors import ConfigurationError, TransactionError, TransportMismatch, WrongEventLoop
from outbox.core.events import Failed, Started, Stopped
from outbox.core.forks import forget_after_fork, never_collect
from outbox.core.listener import Listener, check_listeners
from outbox.core.message import Message
from outbox.core.store import Backlog, Difference, Store, StoredMessage, ThreadNotifying
from outbox.core.tracking import get_tracking_ids, tracking
from outbox.core.transport import Countable, Defaults, Transport
from outbox.core.webhooks import AnySecrets
from outbox.engines import Engines
from outbox.inbound.http.app import HttpApp
from outbox.inbound.http.intake import Intake
from outbox.inbound.http.request import MODES, Mode
from outbox.inbound.http.terms import REQUIRED, Required, Terms
from outbox.inbound.inbox import Memory
from outbox.inbound.receiving import Receiver, Unwanted
from outbox.inbound.storing import stored_first
from outbox.observers import Observers
from outbox.observers.logging import LoggingObserver
from outbox.outbound.callers import at_once, awaited
from outbox.outbound.commits import guard
from outbox.outbound.connections import AnySession, PlainSession
from outbox.outbound.emitter import Emitter, Key
from outbox.outbound.hooks import Callback, HookedSession, after_commit, hooks_of
from outbox.outbound.transactional import opened, transactional
from outbox.owners import Owners
from outbox.relays import Relays
from outbox.settings import Settings, on_top
from outbox.shutdown import Shutdown, on_signals
from outbox.stores.tables import Tables
from outbox.transports.database import DatabaseTransport
from outbox.transports.routes import Routes
from outbox.workers import Workers

Result = TypeVar("Result")

LAST_WORDS = 8.0  # seconds that a relay has which did not end within the grace; a silent database takes most of it


class Outbox:
    """A store, a transport, and the defaults they share. Making one does no input or output and needs no loop."""

    def __init__(self, **options: Any) -> None:
        self._settings: Settings | None = None
        self._given: dict[str, Any] = {}  # options of all setups so far
        self._runs: Counter[asyncio.AbstractEventLoop] = Counter()  # relays and workers that are at work in each loop
        forget_after_fork(self)
        if options:
            self.setup(**options)

    def setup(self, **options: Any) -> None:
        """Take options as `Settings` lists them. Those of earlier calls stay, unless they are given again.

        An option that is None counts as not given. The database and the transport can be replaced; what was made from
        earlier options is forgotten.
        """
        given = on_top(self._given, options)
        self._settings = Settings.of(given)
        self._given = given
        for name in ("engines", "tables", "store", "transport", "_emitter", "_receiver", "_observe"):
            self.__dict__.pop(name, None)
        self.__dict__["_stores"] = {}
        self._emitter  # noqa: B018 - what cannot work is said here, not at the first emit

    def forked(self) -> None:
        """In a child process: forget what is the parent's, its connections and threads above all."""
        never_collect([self.__dict__.pop(name, None) for name in ("store", "transport", "_stores")])
        self._runs.clear()
        if "engines" in self.__dict__:
            self.engines.forked()

    # The parts, each made when it is first needed.

    @property
    def settings(self) -> Settings:
        """The options in force; without setup() those of the environment, if they name a database."""
        if self._settings is None:
            settings = Settings.of({})
            if settings.db_engine_url is None and settings.transport is None and not settings.routes:
                raise ConfigurationError("not set up: call setup(db_engine_url=…) or set OUTBOX_DB_ENGINE_URL")
            self._settings = settings
        return self._settings

    @cached_property
    def tables(self) -> Tables:
        return Tables.named(self.settings.table_name, self.settings.schema)

    @property
    def metadata(self) -> MetaData:
        """The tables, for Alembic's `target_metadata`."""
        return self.tables.metadata

    @cached_property
    def engines(self) -> Engines:
        return Engines(self.settings)

    @cached_property
    def store(self) -> Store:
        """The store of the configured database."""
        return self._store_for(self.engines.main.dialect.name)

    @cached_property
    def transport(self) -> Transport:
        """The configured transport; none means the database."""
        if self._on_database:
            return self._database_transport()
        settings = self.settings
        defaults = Defaults(
            exchange_name=settings.exchange_name,
            queue_prefix=settings.queue_prefix,
            management_url=settings.rabbitmq_management_url,
            source=settings.source or settings.usual_source,
            webhook_secrets=settings.webhook_secrets,
            retry_policy=settings.policy("retry_delays"),
            observe=self._observe,
            max_body_size=settings.max_body_size,
        )
        return routes_for(settings.routes, defaults) if settings.routes else transport_for(settings.transport, defaults)

    @property
    def _on_database(self) -> bool:
        return not self.settings.routes and self.settings.transport in (None, DatabaseTransport.name)

    def _database_transport(self, *, binds: bool = True) -> DatabaseTransport:
        settings = self.settings
        return DatabaseTransport(
            self.store,
            lease=settings.duration("lease"),
            poll_interval=settings.seconds_between_looks,
            observe=self._observe,
            binds=binds,
        )

    @cached_property
    def _stores(self) -> dict[str, Store]:
        return {}

    def _store_for(self, dialect: str) -> Store:
        store = self._stores.get(dialect)
        if store is None:
            self.engines.check_dialect(dialect)
            engine = self.engines.asynchronous_if(dialect)
            store = store_class(dialect)(self.tables, engine, self.settings.clean_up_after)
            if isinstance(store, ThreadNotifying):
                store.notifies_in_thread = self.settings.sync_wakeups
            self._stores[dialect] = store
        return store

    @cached_property
    def _observe(self) -> Observers:
        observers = self.settings.observers or ()
        logged = not self.settings.log or any(isinstance(observer, LoggingObserver) for observer in observers)
        return Observers(observers if logged else [LoggingObserver(), *observers])

    @cached_property
    def _emitter(self) -> Emitter:
        settings = self.settings
        return Emitter(
            self._store_for,
            expiration=None if settings.expiration is None else settings.duration("expiration"),
            max_body_size=settings.max_body_size,
            observe=self._observe,
        )

    @cached_property
    def _receiver(self) -> Receiver:
        settings = self.settings
        return Receiver(self._store_for, self._memory, max_body_size=settings.max_body_size, observe=self._observe)

    @property
    def _memory(self) -> Memory:
        return Memory(self.settings.inbox_retention)

    # Emitting.

    async def emit(
        self,
        session: AnySession,
        routing_key: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        timer_id: str | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> Message | None:
        """Store a message in the session's own transaction; None if the timer already waits.

        The session may be SQLAlchemy's, or a connection of SQLAlchemy, asyncpg, psycopg or aiosqlite. Of a commit on a
        driver's own connection nobody hears: on PostgreSQL the message is found by the next look, at most
        `poll_interval` later.
        """
        emitter = self._emitter
        message = emitter.message(routing_key, body, key=key, headers=headers, content_type=content_type, source=source)
        schedule = emitter.schedule(eta, expiration, timer_id)
        return message if await emitter.write(session, [message], schedule) else None

    def emit_sync(
        self,
        session: PlainSession,
        routing_key: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        timer_id: str | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> Message | None:
        """`emit` for callers without an event loop.

        The session may be a plain one of SQLAlchemy, or a connection of SQLAlchemy, psycopg, sqlite3 or Django.
        """
        emitter = self._emitter
        message = emitter.message(routing_key, body, key=key, headers=headers, content_type=content_type, source=source)
        schedule = emitter.schedule(eta, expiration, timer_id)
        return message if emitter.write_now(session, [message], schedule) else None

    async def emit_many(
        self,
        session: AnySession,
        routing_key: str,
        bodies: Iterable[object],
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> list[Message]:
        """A message for each body, in one statement. `key` may be a function of the body."""
        emitter = self._emitter
        messages = emitter.messages(
            routing_key, bodies, key=key, headers=headers, content_type=content_type, source=source
        )
        await emitter.write(session, messages, emitter.schedule(eta, expiration, None))
        return messages

    def emit_many_sync(
        self,
        session: PlainSession,
        routing_key: str,
        bodies: Iterable[object],
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> list[Message]:
        """`emit_many` for callers without an event loop."""
        emitter = self._emitter
        messages = emitter.messages(
            routing_key, bodies, key=key, headers=headers, content_type=content_type, source=source
        )
        emitter.write_now(session, messages, emitter.schedule(eta, expiration, None))
        return messages

    async def cancel_timer(self, session: AnySession, timer_id: str) -> bool:
        """Delete the message with this timer id if it still waits; says whether it did."""
        return await self._emitter.cancel(session, timer_id)

    def cancel_timer_sync(self, session: PlainSession, timer_id: str) -> bool:
        """`cancel_timer` for callers without an event loop."""
        return self._emitter.cancel_now(session, timer_id)

    # As for the module: ids follow a call, whichever outbox it uses.
    tracking = staticmethod(tracking)
    get_tracking_ids = staticmethod(get_tracking_ids)

    # Receiving.

    async def receive(
        self, queue: str, message: Message, *, session: AnySession | None = None, unwanted: Unwanted = "dead"
    ) -> bool:
        """Store a message from anywhere in a queue of the database, once by its id; False if it was there before.

        In the session's transaction if one is given, otherwise it is committed when this returns. If no listener has
        the queue, the message is a dead letter, or waits for one with `unwanted="wait"`.
        """
        receiver = self._receiver
        receiver.check(queue, message, unwanted)
        if session is not None:
            return await awaited(session, receiver.receive, queue, message, unwanted)
        async with self.transaction() as own:
            return await awaited(own, receiver.receive, queue, message, unwanted)

    def receive_sync(self, queue: str, message: Message, *, session: PlainSession, unwanted: Unwanted = "dead") -> bool:
        """`receive` for callers without an event loop, in their session's transaction."""
        self._receiver.check(queue, message, unwanted)
        return at_once(session, self._receiver.receive, queue, message, unwanted)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session of the outbox's own engine, begun: commits at the end, rolls back on an exception."""
        session = self.engines.session()
        guard(session.sync_session, self._aborted)
        async with hooks_of(session), self.store.turn(for_caller=True), session, session.begin():
            with opened(self, session):
                yield session

    @contextmanager
    def _transaction_sync(self) -> Iterator[Session]:
        with self.engines.plain_session() as session, session.begin(), opened(self, session):
            guard(session, self._aborted)
            yield session

    def _aborted(self, connection: Connection) -> TransactionError | None:
        """Why the database would keep nothing of a transaction; of one that is not known here nothing can be said."""
        with suppress(ConfigurationError):
            return self._store_for(connection.dialect.name).aborted(connection)
        return None

    def transactional(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """A decorator: the argument annotated AsyncSession or Session is one in a transaction, as of `transaction()`.

        Returning commits, any exception rolls back. Called inside another transaction of the same outbox, by the same
        task or thread, the function runs in a savepoint of it; called with a session, in the caller's own transaction.
        """
        return transactional(function, self, self.transaction, self._transaction_sync)

    def after_commit(self, session: HookedSession, callback: Callback) -> None:
        """Call a function when the session's transaction has committed; never if it, or the savepoint, rolls back.

        It may be async in a session of `transaction()` or `transactional`. It runs at most once, and what it raises
        goes to the observers: what must happen is a message.
        """
        after_commit(session, callback, self._observe, self._aborted)

    # Working.

    async def message_relay(self) -> None:
        """Hand stored messages to the transport until SIGINT or SIGTERM."""
        with on_signals() as shutdown:
            try:
                await self.run(shutdown, relay=True)
            finally:
                await self._close_after_last()

    async def worker(self, listeners: Sequence[Listener], *, store_first: bool = False) -> int:
        """Serve listeners until SIGINT or SIGTERM; how many were abandoned because their grace ended.

        Where the database is the transport this needs no relay beside it. With `store_first` a broker's deliveries are
        stored in the database and handled from there, as if all listeners asked for it.
        """
        with on_signals() as shutdown:
            try:
                return await self.run(shutdown, listeners=listeners, store_first=store_first)
            finally:
                await self._close_after_last()

    def running(
        self, *, relay: bool = False, listeners: Sequence[Listener] = (), store_first: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Relay and worker in the background of this block, without signal handlers: for ASGI lifespans.

        If they end by themselves, as when a transport is closed for good, the block is cancelled and raises that error.
        """
        return self._in_background(relay=relay, listeners=listeners, store_first=store_first)

    def http_app(
        self,
        listeners: Sequence[Listener],
        *,
        secrets: AnySecrets | Required | None = REQUIRED,
        max_request_size: int | None = None,
        most_at_once: int = 100,
        timeout: Seconds = 15,
        modes: Collection[Mode] = MODES,
    ) -> HttpApp:
        """An ASGI application that stores CloudEvents and signed webhooks for listeners, and answers when it has.

        Its lifespan is a worker that handles what was stored; a mounted one has `async with app.running():` instead.
        Whoever has no `secrets` and wants none says so with None. A request has at most `max_request_size` bytes (twice
        `max_body_size` and 256 KiB unless it is set), and `timeout` to arrive, and to be stored. Of its `modes`, which
        are "structured" and "binary" CloudEvents and any other "webhook", the first one has everything signed.
        """
        check_listeners(listeners)
        self.engines.check()  # what cannot work is said here, not at the first request
        settings = self.settings
        terms = Terms.of(
            secrets,
            max_request_size,
            most_at_once,
            timeout,
            modes,
            max_body_size=settings.max_body_size,
            inbox_retention=settings.inbox_retention,
        )
        intake = Intake(
            listeners,
            terms,
            lambda: self.store,
            self._memory,
            unroutable=settings.unroutable,
            batch_size=settings.batch_size,
            observe=self._observe,
        )
        working = partial(self._working_off, listeners)
        return HttpApp(intake, working, self._close_after_last, self._observe)

    def _working_off(self, listeners: Sequence[Listener]) -> AbstractAsyncContextManager[None]:
        """Serve what was stored for listeners, whatever the transport for what is emitted here."""
        if self._on_database:
            return self._in_background(listeners=listeners)
        apart = self._database_transport(binds=False)
        return self._in_background(listeners=listeners, transport=apart, leftovers=True)

    def _in_background(self, **work: Any) -> AbstractAsyncContextManager[None]:
        return in_background(lambda shutdown, ready: self.run(shutdown, ready=ready, **work))

    async def run(
        self,
        shutdown: Shutdown,
        *,
        relay: bool = False,
        listeners: Sequence[Listener] = (),
        leftovers: bool = False,
        store_first: bool = False,
        transport: Transport | None = None,
        ready: asyncio.Event | None = None,
    ) -> int:
        """What relay, worker and running share: open, work until the shutdown, close.

        With `leftovers` a worker serves what lies in its transport's queues and routes nothing, so the table may belong
        to another transport by now. Unless another `transport` is given, it is the configured one.
        """
        if listeners or not relay:
            check_listeners(listeners)
        if store_first:
            listeners = [stored_first(listener) for listener in listeners]
        # A transport that holds deliveries is closed with the run that holds them, not with another one beside it.
        if transport is None:
            transport = self._database_transport() if self._on_database else self._transport_here()
        needs_store = relay or isinstance(transport, DatabaseTransport) or self.engines.configured
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._at_work())
            if needs_store:
                self.engines.check()  # a plain engine is told so, with advice
                await (self.store.open() if leftovers else self._open_store(transport))
            stack.push_async_callback(transport.close)
            await transport.open()
            worker = await self._workers.of(transport, listeners, stack) if listeners else None
            if listeners and needs_store:
                await self.owners.record_services(transport, listeners)
            storage = self._workers.storage(transport, listeners, stack)
            if relay and isinstance(transport, Routes):
                await self._relays.bind(transport)
            relays = self._relays.of(transport, relay, routes=not leftovers) if needs_store else []
            what = "worker" if listeners else "relay"
            self._observe(Started(what, self._described(transport, listeners)))
            if ready is not None:
                ready.set()
            besides: list[Awaitable[Any]] = [each.run(shutdown.begun) for each in relays]
            if storage is not None:
                besides.append(storage.run(shutdown.begun, shutdown.forced))
            tasks = [asyncio.create_task(self._ending_all(what, each, shutdown)) for each in besides]
            stack.push_async_callback(_end, tasks, shutdown, self.settings.duration("grace"))
            abandoned = 0
            if worker is not None:
                serving = worker.run(shutdown.begun, shutdown.forced)
                abandoned = await self._ending_all(what, serving, shutdown)
            else:
                await shutdown.begun.wait()
        self._observe(Stopped(what, abandoned))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises what ended one of them: its transport is closed for good
        return abandoned

    async def _ending_all(self, what: str, work: Awaitable[Result], shutdown: Shutdown) -> Result:
        """One part of a run that ends by itself ends everything."""
        try:
            return await work
        except Exception as error:
            if not shutdown.begun.is_set():
                self._observe(Failed(what, error))
            raise
        finally:
            shutdown.begun.set()

    def _transport_here(self) -> Transport:
        """The configured transport, whose connections are those of one event loop until its runs have ended."""
        here = asyncio.get_running_loop()
        for loop in [loop for loop in self._runs if loop is not here]:
            if not loop.is_closed():
                raise WrongEventLoop(
                    f"a relay or a worker of this outbox is at work in another event loop, and the connections of the "
                    f"transport {self.transport.name!r} are that loop's: make an Outbox for each loop"
                )
            del self._runs[loop]
            self.__dict__.pop("transport", None)  # it was never closed, and cannot be any more
        return self.transport

    async def _close_after_last(self) -> None:
        if not self._runs[asyncio.get_running_loop()]:
            await self.close()

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self._runs[loop] += 1
        try:
            yield
        finally:
            self._runs[loop] -= 1
            if not self._runs[loop]:
                del self._runs[loop]
                if self.engines.configured:
                    await self.store.close()

    async def _open_store(self, transport: Transport) -> None:
        await self.store.open()
        recorded = await self.store.record_transport(transport.name)
        if recorded != transport.name:
            raise TransportMismatch(
                f"the table {self.tables.messages.fullname!r} belongs to the transport {recorded!r}, and this process "
                f"uses {transport.name!r}: it would take the other's messages. If the change is meant, stop the "
                f"processes of {recorded!r} and run: outbox tables switch-transport {transport.name}"
            )
        await self.owners.record_address(self.tables.messages.fullname, transport)

    @property
    def owners(self) -> Owners:
        """Whose queues are recorded in the database."""
        return Owners(self.store, self.settings, self._observe)

    @property
    def _relays(self) -> Relays:
        return Relays(self.store, self.settings, self._observe)

    @property
    def _workers(self) -> Workers:
        return Workers(
            self.store if self.engines.configured else None,
            self.engines,
            self.transport,
            self.settings,
            self._memory,
            self._database_transport,
            self._observe,
        )

    def _described(self, transport: Transport, listeners: Sequence[Listener]) -> str:
        queues = ", ".join(listener.queue for listener in listeners)
        return f"transport {transport.name}" + (f", queues {queues}" if queues else "")

    # Looking and mending.

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters: those of the relay, and those of the transport's queues where it keeps them."""
        of_queues = self.transport.dead_letters
        if of_queues is None:
            return self.store.dead_letters
        if not self.engines.configured or of_queues is self.store.dead_letters:
            return of_queues
        return AllDeadLetters(self.store.dead_letters, of_queues)

    async def backlog(self) -> Backlog:
        """What lies where at this moment, in the database and in the queues of a broker. Of the latter some is unknown.

        A broker that does not answer within seconds makes its numbers unknown, which is none.
        """
        backlog, transport = await self.store.backlog(), self.transport
        if not isinstance(transport, Countable):
            return backlog
        return backlog.beside(await transport.counted(await self.store.owners()))

    async def messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]:
        """Stored messages, dead letters left out."""
        return await self.store.list_messages(state=state, queue=queue, limit=limit, after=after)

    async def find(self, message_id: str) -> list[StoredMessage]:
        """Every place where a message is now, with its walk so far."""
        return await self.store.find(message_id)

    async def bindings(self) -> list[Binding]:
        """Which queues ask for which routing keys."""
        return await self.store.bindings()

    async def unbind(self, queue: str) -> int:
        """Remove a queue's bindings; what lies in it stays. Returns how many there were."""
        return await self.store.unbind(queue)

    async def create_tables(self) -> None:
        """Make the tables that are missing."""
        await self.store.create_tables()

    async def check_tables(self) -> list[Difference]:
        """How the tables of the database differ from those this version needs, and the SQL that mends it."""
        return await self.store.check_tables()

    async def close(self) -> None:
        """Let go of this event loop's connections; the next use makes new ones. Given engines stay as they are."""
        for store in self._stores.values():
            await store.close()
        if "engines" in self.__dict__:
            await self.engines.close()


async def _end(tasks: list[asyncio.Task[Any]], shutdown: Shutdown, grace: timedelta) -> None:
    """Let relays finish the round they are in, within the grace and unless the shutdown is forced."""
    shutdown.begun.set()
    forced = asyncio.create_task(shutdown.forced.wait())
    ending: list[asyncio.Future[Any]] = [forced, asyncio.gather(*tasks, return_exceptions=True)]
    try:
        await asyncio.wait(ending, timeout=grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (forced, *tasks):
            task.cancel()
        await asyncio.wait([forced, *tasks], timeout=LAST_WORDS)
