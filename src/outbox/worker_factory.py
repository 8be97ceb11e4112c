"""WorkerFactory: what a process runs to handle deliveries, made from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta

from sqlalchemy.orm import Session

from outbox.core.errors import ConfigurationError
from outbox.core.events import Bound, Observer
from outbox.core.listener import Listener
from outbox.core.store import Store
from outbox.core.transport import Transport, check_features
from outbox.engines import Engines, ListenerSessions
from outbox.inbound.batch_handling import BatchHandling
from outbox.inbound.batch_inbox import BatchInbox
from outbox.inbound.handling import Handling
from outbox.inbound.inbox import Inbox, Memory
from outbox.inbound.invocation import SESSION_TIME_LIMIT, Invocation, IsolationOf
from outbox.inbound.on_error import OnErrorInvocation
from outbox.inbound.reruns import Reruns
from outbox.inbound.store_first import DeliveryStorage, Sources, as_storage
from outbox.inbound.threads import Threads
from outbox.inbound.transactions import Leases
from outbox.inbound.worker import DeliverySource, Handler, Worker
from outbox.rebinding import Rebinding
from outbox.settings import Settings


class WorkerFactory:
    """Makes the workers of one outbox."""

    def __init__(
        self,
        store: Store | None,  # none: there is no database
        engines: Engines,
        transport: Transport,  # as configured, which names its queues
        settings: Settings,
        memory: Memory,
        database: Callable[[], Transport],
        observe: Observer,
    ) -> None:
        self._store = store
        self._engines = engines
        self._transport = transport
        self._settings = settings
        self._memory = memory
        self._database = database
        self._observe = observe

    async def of(self, transport: Transport, listeners: Sequence[Listener], stack: AsyncExitStack) -> Worker:
        """What handles deliveries. It is ended before the stack is."""
        if not transport.features.consumes:
            raise ConfigurationError(
                f"the transport {transport.name!r} only publishes: a worker cannot take from it. "
                "What comes in over HTTP is served by http_app(listeners)"
            )
        check_features(transport, listeners)
        threads = Threads(sum(listener.concurrency * (1 if listener.on_error is None else 2) for listener in listeners))
        stack.callback(threads.shutdown)
        handlings = {listener: self.handling(listener, threads) for listener in listeners}
        for handling in handlings.values():
            await handling.check()
        rebinding = Rebinding(self._settings, self._observe, self._store)
        await rebinding.before_start(transport, listeners)
        await transport.declare(listeners)
        for listener in listeners:
            self._observe(Bound(listener.binding))
        await rebinding.at_start(transport, listeners)
        stored = _to_store(transport, listeners)
        if not stored:
            return self._serving(transport, handlings)
        database = self._database()
        stack.push_async_callback(database.close)
        await database.declare(stored)
        return self._serving(Sources(transport, database, stored), handlings)

    def storage(self, transport: Transport, listeners: Sequence[Listener], stack: AsyncExitStack) -> Worker | None:
        """What takes deliveries from a broker and stores them, for the listeners that ask for it."""
        settings, store, storing = self._settings, self._store, {}
        if store is None:
            return None
        for listener in _to_store(transport, listeners):
            each = DeliveryStorage(
                store,
                self._memory,
                listener.queue,
                queue_name=self._queue_name(listener),
                batch_size=settings.batch_size,
                redact_error=settings.redact_error or str,
                observe=self._observe,
            )
            stack.push_async_callback(each.close)
            storing[as_storage(listener, settings.batch_size)] = each
        return self._serving(transport, storing, watches=False) if storing else None

    def _serving(
        self, source: DeliverySource, handlings: Mapping[Listener, Handler], *, watches: bool = True
    ) -> Worker:
        settings = self._settings
        return Worker(
            source,
            handlings,
            prefetch=settings.prefetch_count,
            grace=settings.duration("grace"),
            observe=self._observe,
            watches=watches,
            restart_delay=settings.restart_delay,
        )

    def handling(self, listener: Listener, threads: Threads) -> Handling:
        """What becomes of a listener's deliveries, one by one."""
        settings = self._settings
        store = self._store
        sessions = self._engines.sessions(store, listener) if store else None
        takes_lists = listener.batch is not None
        kind_of_inbox = BatchInbox if takes_lists else Inbox
        queue_name = self._queue_name(listener)
        also = None if queue_name is None else listener.queue
        inbox = kind_of_inbox(store, self._memory, queue_name or listener.queue, also=also) if store else None
        reruns = Reruns(store, listener.queue, self._observe) if store else None
        leases = Leases(store, settings.duration("grace")) if store else None
        call = Invocation(
            listener,
            sessions,
            inbox,
            threads,
            self._session_time_limit(listener),
            queue_name,
            unrenewed_lease=self._unrenewed_lease(listener),
            isolation_of=IsolationOf(listener, store) if store and listener.isolation_level is not None else None,
            reruns=reruns,
            leases=leases,
        )
        if (call.in_transaction or listener.on_error) and not store:
            raise ConfigurationError(f"{listener.queue} asks for a session, but no database is set up")
        if listener.store_first and not store:
            raise ConfigurationError(f"{listener.queue}: store_first=True, but no database is set up to store in")
        if not call.in_transaction and (
            listener.isolation_level or (listener.session_factory and not listener.on_error)
        ):
            raise ConfigurationError(
                f"{listener.queue} asks for no session: give its callback an argument annotated AsyncSession or "
                "Session, or leave out isolation_level and session_factory"
            )
        if call.arguments.session is Session or (listener.on_error and not call.arguments.is_async):
            self._engines.synchronous  # noqa: B018 - a missing driver is said before any message is touched
        elif call.in_transaction and listener.session_factory is None:
            self._engines.check_here()
        return (BatchHandling if takes_lists else Handling)(
            listener,
            call,
            retry_policy=listener.retry_policy or settings.policy("retry_delays"),
            redact_error=settings.redact_error or str,
            observe=self._observe,
            on_error=self._on_error(listener, sessions, threads, reruns, leases),
        )

    def _queue_name(self, listener: Listener) -> str | None:
        """What the destination calls the listener's queue, if that is something else."""
        name = self._transport.queue_name(listener.queue)
        return None if name == listener.queue else name

    def _on_error(
        self,
        listener: Listener,
        sessions: ListenerSessions | None,
        threads: Threads,
        reruns: Reruns | None,
        leases: Leases | None,
    ) -> OnErrorInvocation | None:
        on_error = listener.on_error
        if on_error is None or sessions is None or reruns is None or leases is None:
            return None
        limit = listener.time_limit or self._session_time_limit(listener)
        return OnErrorInvocation(
            listener, on_error, sessions, threads, reruns, leases, limit=limit, observe=self._observe
        )

    def _session_time_limit(self, listener: Listener) -> timedelta:
        """The default for a listener's transaction: shorter than a lease that it keeps from being renewed."""
        if self._store is None or self._store.transactions.writes_side_by_side:
            return SESSION_TIME_LIMIT
        return min(SESSION_TIME_LIMIT, self._lease_of(listener) * 0.75)

    def _unrenewed_lease(self, listener: Listener) -> timedelta | None:
        """A lease that the listener's own transaction keeps from being renewed."""
        if self._store is None or self._store.transactions.writes_side_by_side:
            return None
        return self._lease_of(listener)

    def _lease_of(self, listener: Listener) -> timedelta:
        return listener.lease_time or self._settings.duration("lease")


def _to_store(transport: Transport, listeners: Sequence[Listener]) -> list[Listener]:
    """Those whose deliveries are stored first. What comes from the database is stored already."""
    if transport.features.in_store:
        return []
    return [listener for listener in listeners if listener.store_first]
