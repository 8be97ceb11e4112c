"""Rebinding: what queues still get although their listeners do not ask for it any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outbox.core.binding import Binding
from outbox.core.diagnosis import Finding, Level
from outbox.core.errors import ConfigurationError
from outbox.core.events import Advised, Observer, Unbound
from outbox.core.listener import Listener
from outbox.core.store import Store
from outbox.core.transport import Route, Transport
from outbox.settings import Settings

ADVICE = (
    "If no other process needs it, run: outbox queues rebind MODULE:ATTRIBUTE, or set rebind_queues=True, which does "
    "the same whenever a worker starts"
)

UNTOLD = (
    "rebind_queues=True removes nothing here: the transport does not tell what its queues are bound to, and no "
    "database records it. On RabbitMQ set rabbitmq_management_url"
)


class Rebinding:
    """A worker adds the bindings of its listeners. Those of earlier listeners stay until an operator removes them.

    A broker may not tell its bindings, so workers record theirs in the database. What is recorded and no more declared
    is known without the broker.
    """

    def __init__(self, settings: Settings, observe: Observer, store: Store | None) -> None:
        self._settings = settings
        self._observe = observe
        self._store = store  # none: there is no database

    async def before_start(self, transport: Transport, listeners: Sequence[Listener]) -> None:
        """Before the listeners are declared: whatever is bound is recorded, even if this process ends meanwhile."""
        if self._store is not None and _is_apart(transport):
            await self._store.owners.declare([_at_broker(listener.binding, transport) for listener in listeners])

    async def at_start(self, transport: Transport, listeners: Sequence[Listener]) -> None:
        """After the listeners were declared: remove what else their queues get, or say that they get it."""
        if not transport.features.changes_bindings:
            return
        try:
            stale = await self._stale(transport, listeners, at_start=True)
        except ConfigurationError as error:
            self._observe(Advised("bindings", str(error)))
            return
        if self._settings.rebind_queues and stale is None:
            self._observe(Advised("bindings", UNTOLD))
            return
        if self._settings.rebind_queues:
            await self._remove(transport, listeners, stale or ())
            return
        for binding in stale or ():
            self._observe(Advised(f"the queue {binding.queue!r}", f"{_told(binding, listeners)}. {ADVICE}"))

    async def replace(self, transport: Transport, listeners: Sequence[Listener]) -> list[Binding]:
        """Remove what the queues of these listeners get beside what they ask for, which must be bound already."""
        try:
            stale = await self._stale(transport, listeners)
        except ConfigurationError:
            stale = None if self._settings.rabbitmq_management_url else await self.recorded(transport, listeners)
            if stale is None:
                raise
        await self._remove(transport, listeners, stale or ())
        return stale or []

    async def findings(self, transport: Transport, listeners: Sequence[Listener]) -> list[Finding]:
        """What a doctor should know of them."""
        stale = await self._stale(transport, listeners) if transport.features.changes_bindings else None
        if stale is None:
            return []
        told = [Finding(Level.WARNING, "bindings", _told(binding, listeners), ADVICE) for binding in stale]
        return told or [Finding(Level.OK, "bindings", "queues get what their listeners ask for, and nothing else")]

    async def recorded(self, transport: Transport, listeners: Sequence[Listener]) -> list[Binding] | None:
        """What workers declared at a broker for these queues and their listeners do not ask for; None: not recorded."""
        if self._store is None or not _is_apart(transport):
            return None
        queues = {transport.queue_name(listener.queue): listener for listener in listeners}
        declared = [each for each in await self._store.owners.declared() if each.queue in queues]
        found = [Binding(queues[each.queue].queue, each.binding_key) for each in declared]
        return [binding for binding in found if binding.binding_key != _wanted(binding, listeners)]

    async def _stale(
        self, transport: Transport, listeners: Sequence[Listener], *, at_start: bool = False
    ) -> list[Binding] | None:
        found = await transport.bindings([listener.queue for listener in listeners], at_start=at_start)
        if found is None:
            return await self.recorded(transport, listeners)
        return [binding for binding in found if binding.binding_key != _wanted(binding, listeners)]

    async def _remove(self, transport: Transport, listeners: Sequence[Listener], stale: Iterable[Binding]) -> None:
        for binding in stale:
            await transport.unbind(binding)
            self._observe(Unbound(binding))
        if self._store is not None:
            for binding in await self.recorded(transport, listeners) or ():
                await self._store.owners.retract(_at_broker(binding, transport))


@dataclass(frozen=True, slots=True)
class FurtherKeys:
    """Binding keys of a queue in the table that no route names."""

    queue: str
    keys: Sequence[str]
    is_routes: bool  # whether a route has the queue

    @property
    def told(self) -> str:
        return f"{self.queue} gets copies of {', '.join(self.keys)}, and no route says so"

    @property
    def removal(self) -> str:
        """All keys of a queue go, and what is routed before a relay binds the others again is not copied to it."""
        command = f"run: outbox queues remove {self.queue}"
        if not self.is_routes:
            return command
        return (
            f"stop all relays, {command}, and start them: a relay binds what it needs. Or set rebind_queues=True, "
            "which removes such keys whenever a relay starts"
        )


def further_keys(bound: Iterable[Binding], routes: Sequence[Route]) -> list[FurtherKeys]:
    """What is bound in the table beside what the routes ask for."""
    ours = [binding for route in routes for binding in route.bindings]
    further: dict[str, list[str]] = {}
    for binding in bound:
        if binding not in ours:
            further.setdefault(binding.queue, []).append(binding.binding_key)
    names = {route.name for route in routes}
    return [FurtherKeys(queue, keys, queue in names) for queue, keys in further.items()]


def _is_apart(transport: Transport) -> bool:
    """Whether its bindings are elsewhere than in the database."""
    return transport.features.changes_bindings and not transport.features.in_store


def _at_broker(binding: Binding, transport: Transport) -> Binding:
    """By the name under which the queue is shared with others."""
    return Binding(transport.queue_name(binding.queue), binding.binding_key)


def _wanted(binding: Binding, listeners: Sequence[Listener]) -> str:
    return next(listener.binding_key for listener in listeners if listener.queue == binding.queue)


def _told(binding: Binding, listeners: Sequence[Listener]) -> str:
    wanted = _wanted(binding, listeners)
    return f"{binding.queue!r} still gets {binding.binding_key}, and its listener asks for {wanted} only"
