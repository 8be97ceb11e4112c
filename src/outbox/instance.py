"""Outbox: one configured instance. Wires the parts and delegates to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.binding import Binding
from outbox.core.callers_line import CallersLine
from outbox.core.dead_letter import DeadLetters
from outbox.core.durations import Seconds
from outbox.core.forks import forget_after_fork
from outbox.core.listener import Listener, check_listeners
from outbox.core.log import LogAdministration
from outbox.core.message import get_tracking_ids, tracking
from outbox.core.states import in_state
from outbox.core.store import Backlog, Difference, Store, StoredMessage
from outbox.core.transport import Transport
from outbox.core.webhooks import AnySecrets
from outbox.engines import Engines
from outbox.inbound.http.options import REQUIRED, HttpAppOptions, Required
from outbox.inbound.http.request import MODES, Mode
from outbox.lifecycle import Lifecycle
from outbox.options import Options
from outbox.outbound.after_commit import Callback, HookedSession, add_hook, check_not_abandoned, guard, hooks_of
from outbox.outbound.emitter import plain_session
from outbox.outbound.transactional import opened, transactional
from outbox.owners import Owners
from outbox.parts import Parts
from outbox.receiving import Receiving
from outbox.settings import Settings, on_top
from outbox.shutdown import Shutdown
from outbox.stores.tables import Tables

if TYPE_CHECKING:
    from outbox.inbound.http.app import HttpApp

Result = TypeVar("Result")


class Outbox(Receiving):
    """A store, a transport, and the defaults they share. Making one does no input or output and needs no loop."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self._given: dict[str, Any] = {}  # options of all setups so far
        self._lifecycle = Lifecycle(lambda: self._parts, lambda: self.close())
        forget_after_fork(self)
        if options:
            self.setup(**options)

    def setup(self, **options: Unpack[Options]) -> None:
        """Take options as `Options` lists them. Those of earlier calls stay, unless they are given again.

        An option that is None counts as not given. The database and the transport can be replaced; what was made from
        earlier options is forgotten.
        """
        given = on_top(self._given, options)
        parts = Parts(Settings.of(given))
        parts.emitter  # noqa: B018 - what cannot work is said here, not at the first emit
        self._given, self._parts = given, parts

    def forked(self) -> None:
        """In a child process: forget what is the parent's."""
        self._lifecycle.forked()
        if "_parts" in self.__dict__:
            self._parts.forked()

    # The parts.

    @property
    def settings(self) -> Settings:
        """The options in force; without setup() those of the environment, if they name a database."""
        return self._parts.settings

    @property
    def tables(self) -> Tables:
        """The tables, by the names that the settings give them."""
        return self._parts.tables

    @property
    def metadata(self) -> MetaData:
        """The tables, for Alembic's `target_metadata`."""
        return self._parts.tables.metadata

    @property
    def engines(self) -> Engines:
        """The connections to the configured database."""
        return self._parts.engines

    @property
    def store(self) -> Store:
        """The store of the configured database."""
        return self._parts.store

    @property
    def transport(self) -> Transport:
        """The configured transport; none means the database."""
        return self._parts.transport

    @property
    def owners(self) -> Owners:
        """Whose queues are recorded in the database."""
        return self._parts.owners

    @property
    def wal(self) -> LogAdministration:
        """The replication slot by which relays with `relay_from="wal"` read the database's log."""
        return self._parts.log_administration()

    # As for the module: ids follow a call, whichever outbox it uses.
    tracking = staticmethod(tracking)
    get_tracking_ids = staticmethod(get_tracking_ids)

    # Transactions.

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session of the outbox's own engine, begun: commits at the end, rolls back on an exception."""
        parts = self._parts
        session = parts.engines.session()
        guard(session.sync_session, parts.aborted)
        async with hooks_of(session), parts.store.transactions.turn(for_caller=True), session, session.begin():
            with opened(self, session):
                yield session
                check_not_abandoned(session.sync_session)

    @contextmanager
    def transaction_sync(self) -> Iterator[Session]:
        """`transaction` for callers without an event loop."""
        parts = self._parts
        with parts.engines.plain_session() as session, session.begin(), opened(self, session):
            guard(session, parts.aborted)
            yield session
            check_not_abandoned(session)

    def transactional(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """A decorator: the argument annotated AsyncSession or Session is one in a transaction, as of `transaction()`.

        Returning commits, any exception rolls back. Called inside another transaction of the same outbox, by the same
        task or thread, the function runs in a savepoint of it; called with a session, in the caller's own transaction.
        """
        return transactional(function, self, self.transaction, self.transaction_sync)

    def after_commit(self, session: HookedSession, callback: Callback) -> None:
        """Call a function when the session's transaction has committed; never if it, or the savepoint, rolls back.

        It may be async in a session of `transaction()` or `transactional`. It runs at most once, and what it raises
        goes to the observers: what must happen is a message.
        """
        add_hook(plain_session(session), callback, self._parts.observe, self._parts.aborted)

    # Working.

    async def message_relay(self) -> None:
        """Hand stored messages to the transport until SIGINT or SIGTERM."""
        await self._lifecycle.until_signals(relay=True)

    async def worker(self, listeners: Sequence[Listener], *, store_first: bool = False) -> int:
        """Serve listeners until SIGINT or SIGTERM; how many were abandoned because their grace ended.

        Where the database is the transport this needs no relay beside it. With `store_first` a broker's deliveries are
        stored in the database and handled from there, as if all listeners asked for it.
        """
        return await self._lifecycle.until_signals(listeners=listeners, store_first=store_first)

    def running(
        self, *, relay: bool = False, listeners: Sequence[Listener] = (), store_first: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Relay and worker in the background of this block, without signal handlers: for ASGI lifespans.

        If they end by themselves, as when a transport is closed for good, the block is cancelled and raises that error.
        """
        return self._lifecycle.in_background(relay=relay, listeners=listeners, store_first=store_first)

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

        With `leftovers` a worker handles what is in its transport's queues and routes nothing, so the table may belong
        to another transport by now. Unless another `transport` is given, it is the configured one.
        """
        return await self._lifecycle.run(
            shutdown,
            relay=relay,
            listeners=listeners,
            leftovers=leftovers,
            store_first=store_first,
            transport=transport,
            ready=ready,
        )

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
        Pass `secrets=None` to accept unsigned requests. A request has at most `max_request_size` bytes (twice
        `max_body_size` and 256 KiB unless it is set), and `timeout` to arrive, and to be stored. Of its `modes`, which
        are "structured" and "binary" CloudEvents and any other "webhook", the first one has everything signed.
        """
        from outbox.inbound.http.app import HttpApp

        check_listeners(listeners)
        parts = self._parts
        parts.engines.check()  # what cannot work is said here, not at the first request
        options = HttpAppOptions.of(
            secrets,
            max_request_size,
            most_at_once,
            timeout,
            modes,
            max_body_size=parts.settings.max_body_size,
            inbox_retention=parts.settings.inbox_retention,
        )
        intake, lifecycle = parts.intake(listeners, options, lambda: self.store), self._lifecycle
        return HttpApp(intake, lambda: lifecycle.working_off(listeners), lifecycle.close_after_last, parts.observe)

    # Reading and changing what is stored.

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters: those of the relay, and those of the transport's queues where it keeps them."""
        return self._parts.dead_letters

    async def backlog(self) -> Backlog:
        """How many messages are where now, in the database and in a broker's queues. Some of the latter is unknown.

        A broker that does not answer within seconds makes its numbers unknown, which is none.
        """
        return await self._parts.backlog()

    async def messages(
        self, *, state: str | None = None, queue: str | None = None, limit: int = 100, after: int = 0
    ) -> list[StoredMessage]:
        """Stored messages, dead letters left out.

        The state is `waiting`, `unroutable`, `queued`, `retrying`, `sent` or `handled`.
        """
        inspection = self.store.inspection
        found, deprecated = await in_state(inspection, state, queue=queue, limit=limit, after=after)
        if deprecated is not None:
            CallersLine.here().warn(deprecated, DeprecationWarning)
        return found

    async def find(self, message_id: str) -> list[StoredMessage]:
        """Every place where a message is now, with its walk so far."""
        return await self.store.inspection.find(message_id)

    async def bindings(self) -> list[Binding]:
        """Which queues ask for which routing keys."""
        return await self.store.queues.bindings()

    async def unbind(self, queue: str) -> int:
        """Remove a queue's bindings; its messages stay. Returns how many there were."""
        return await self.store.queues.unbind(queue)

    async def create_tables(self) -> None:
        """Make the tables that are missing."""
        await self.store.maintenance.create_tables()

    async def check_tables(self) -> list[Difference]:
        """How the tables of the database differ from those this version needs, and the SQL that mends it."""
        return await self.store.maintenance.check_tables()

    async def close(self) -> None:
        """Let go of this event loop's connections; the next use makes new ones. Given engines stay as they are."""
        if "_parts" in self.__dict__:
            await self._parts.close()
