"""Owners: which service a queue belongs to, and where a table's messages go; another one is told at its start."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from outbox.adapters import address_of
from outbox.core.diagnosis import Finding, Level
from outbox.core.events import Advised, Observer
from outbox.core.listener import Listener
from outbox.core.store import TRANSPORT, Store
from outbox.core.transport import Transport
from outbox.settings import Settings


class Owners:
    """The first service of a queue is recorded in the database. It forbids nothing: a change may well be meant."""

    def __init__(self, store: Store, settings: Settings, observe: Observer) -> None:
        self._store = store
        self._settings = settings
        self._observe = observe

    async def record_address(self, table: str, transport: Transport) -> None:
        """Say where a transport leads, and be told if another process said something else."""
        addresses = self._addresses(transport)
        if not addresses:
            return
        for route, recorded in (await self._store.owners.record(addresses)).items():
            if recorded != addresses[route]:
                where = f"the route {route!r}" if route else f"the table {table!r}"
                self._observe(Advised(where, _two_addresses(recorded, addresses[route], transport.name, route)))

    async def record_services(self, transport: Transport, listeners: Sequence[Listener]) -> None:
        """The same for the queues of listeners."""
        services = self._services(transport, listeners)
        for queue, recorded in (await self._store.owners.record(services)).items():
            if recorded != services[queue]:
                self._observe(Advised(f"the queue {queue!r}", _two_services(queue, recorded, services[queue])))

    async def findings(self, transport: Transport, listeners: Sequence[Listener]) -> list[Finding]:
        """What a doctor should know of them. It records nothing."""
        owners = await self._store.owners.all()
        findings: list[Finding] = []
        for route, address in self._addresses(transport).items():
            recorded = owners.get(route, address)
            if recorded != address:
                what, advice = _two_addresses(recorded, address, transport.name, route).split(". ", 1)
                what = f"{route}: {what}" if route else what
                findings.append(Finding(Level.WARNING, "transport", what, advice))
        for queue, service in self._services(transport, listeners).items():
            recorded = owners.get(queue, service)
            if recorded != service:
                what, advice = _two_services(queue, recorded, service).split(". ", 1)
                findings.append(Finding(Level.WARNING, "queues", f"{queue}: {what}", advice))
        return findings

    def _addresses(self, transport: Transport) -> dict[str, str]:
        """Where a transport leads, as far as that is known; with routes, by the queue of each."""
        if transport.routes:
            found = {route.name: address_of(None, route.transport) for route in transport.routes}
        else:
            found = {TRANSPORT: address_of(self._settings.transport, transport)}
        return {route: address for route, address in found.items() if address is not None}

    def _services(self, transport: Transport, listeners: Sequence[Listener]) -> dict[str, str]:
        """Whose each queue is, by the name under which it is shared with others."""
        services: dict[str, str] = {}
        for listener in listeners:
            service = self._settings.service or service_of(listener)
            brokers = transport.queue_name(listener.queue)
            shared = listener.queue if listener.store_first else brokers
            # Stored first, the rows of two prefixes share one queue of the database, also within one service.
            services[brokers] = service
            if shared != brokers:
                services[shared] = f"{service}, for {brokers}"
        return services


def service_of(listener: Listener) -> str:
    """The top-level package of a listener; that of a program is called like its file."""
    callback = listener.callback
    while isinstance(callback, functools.partial):
        callback = callback.func
    module = str(getattr(callback, "__module__", None) or type(callback).__module__)
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return module.partition(".")[0]


def _two_addresses(recorded: str, address: str, transport: str, route: str) -> str:
    command = f"queues release {route}" if route else f"tables switch-transport {transport}"
    return (
        f"its messages go to {recorded} elsewhere, and to {address} here: each place gets a part of them. If the "
        f"address has changed, stop the processes with the old one and run: outbox {command}"
    )


def _two_services(queue: str, recorded: str, service: str) -> str:
    return (
        f"it belongs to the service {recorded!r}, and this one is {service!r}: each gets a part of its messages. Give "
        f"the listener a queue= of its own; or, if it is the same service, set service={recorded!r}, or run: outbox "
        f"queues release {queue}"
    )


async def recorded_queues(store: Store) -> list[str]:
    """The queues that workers have recorded, by the names that their destination knows them by."""
    return [queue for queue in await store.owners.all() if queue != TRANSPORT]
