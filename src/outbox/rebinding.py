"""Rebinding: what queues still get although their listeners do not ask for it any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outbox.core.binding import Binding
from outbox.core.diagnosis import Finding, Level
from outbox.core.errors import ConfigurationError
from outbox.core.events import Advised, Observer, Unbound
from outbox.core.listener import Listener
from outbox.core.transport import Rebindable, Transport
from outbox.settings import Settings

ADVICE = (
    "If no other process needs it, run: outbox queues rebind MODULE:ATTRIBUTE, or set rebind_queues=True, which does "
    "the same whenever a worker starts"
)


class Rebinding:
    """A worker adds the bindings of its listeners. Those of earlier listeners stay until somebody wants them gone."""

    def __init__(self, settings: Settings, observe: Observer) -> None:
        self._settings = settings
        self._observe = observe

    async def at_start(self, transport: Transport, listeners: Sequence[Listener]) -> None:
        """After the listeners were declared: remove what else their queues get, or say that they get it."""
        if not isinstance(transport, Rebindable):
            return
        try:
            stale = await self._stale(transport, listeners, at_start=True)
        except ConfigurationError as error:
            self._observe(Advised("bindings", str(error)))
            return
        if self._settings.rebind_queues:
            await self._remove(transport, stale or ())
            return
        for binding in stale or ():
            self._observe(Advised(f"the queue {binding.queue!r}", f"{_told(binding, listeners)}. {ADVICE}"))

    async def replace(self, transport: Rebindable, listeners: Sequence[Listener]) -> list[Binding]:
        """Remove what the queues of these listeners get beside what they ask for, which must be bound already."""
        stale = await self._stale(transport, listeners)
        await self._remove(transport, stale or ())
        return stale or []

    async def findings(self, transport: Transport, listeners: Sequence[Listener]) -> list[Finding]:
        """What a doctor should know of them."""
        stale = await self._stale(transport, listeners) if isinstance(transport, Rebindable) else None
        if stale is None:
            return []
        told = [Finding(Level.WARNING, "bindings", _told(binding, listeners), ADVICE) for binding in stale]
        return told or [Finding(Level.OK, "bindings", "queues get what their listeners ask for, and nothing else")]

    async def _stale(
        self, transport: Rebindable, listeners: Sequence[Listener], *, at_start: bool = False
    ) -> list[Binding] | None:
        found = await transport.bindings([listener.queue for listener in listeners], at_start=at_start)
        wanted = {listener.binding for listener in listeners}
        return None if found is None else [binding for binding in found if binding not in wanted]

    async def _remove(self, transport: Rebindable, stale: Iterable[Binding]) -> None:
        for binding in stale:
            await transport.unbind(binding)
            self._observe(Unbound(binding))


def _told(binding: Binding, listeners: Sequence[Listener]) -> str:
    wanted = next(listener.binding_key for listener in listeners if listener.queue == binding.queue)
    return f"{binding.queue!r} still gets {binding.binding_key}, and its listener asks for {wanted} only"
