"""Faults of relays that read the log: what strikes the one that has the slot, and what strikes the slot."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping

from tests.chaos.application import Application
from tests.chaos.database import Database
from tests.chaos.log import LoggedDatabase
from tests.chaos.processes import Crew, Member
from tests.chaos.schedule import Planned
from tests.support.proxy import CONFIRM, Link

Until = Callable[[Callable[[], object]], Awaitable[None]]


class _Aim:
    """Waits for a confirm to the relay that has the slot, whichever that is meanwhile."""

    def __init__(self) -> None:
        self._relay: Member | None = None
        self._incarnation = 0

    @property
    def hit(self) -> bool:
        return self._relay is not None and _link(self._relay).tripped.is_set()

    def at(self, relay: Member | None) -> None:
        """Aim at this one, and no longer at the one before."""
        if relay is self._relay and (relay is None or relay.incarnation == self._incarnation):
            return
        if self._relay is not None:
            _link(self._relay).trip_at(())
            _link(self._relay).heal()
        self._relay = relay
        if relay is not None:
            self._incarnation = relay.incarnation
            _link(relay).trip_at((CONFIRM,), hangs=True)

    def kill(self) -> None:
        if self._relay is not None and self._relay.incarnation == self._incarnation:
            self._relay.signal(signal.SIGKILL)


def _link(relay: Member) -> Link:
    assert relay.broker_link is not None
    return relay.broker_link


class LogFaults:
    """The relay that has the slot is sought when a fault strikes: which one it is no schedule can know."""

    def __init__(
        self, crew: Crew, application: Application, alone: Mapping[Database, asyncio.Lock], until: Until
    ) -> None:
        self._crew = crew
        self._application = application
        self._alone = alone
        self._until = until
        self.ways: Mapping[str, Callable[[Planned], Awaitable[None]]] = {
            "kill the active relay": self._kill,
            "kill before the confirm": self._kill_before_the_confirm,
            "freeze the active relay": self._freeze,
            "end the stream": self._end_the_stream,
            "drop the slot": self._drop_the_slot,
        }

    async def _kill(self, fault: Planned) -> None:
        (await self._active()).signal(signal.SIGKILL)

    async def _kill_before_the_confirm(self, fault: Planned) -> None:
        """The broker has taken a message, its confirm vanishes, and with it the relay."""
        aim = _Aim()
        try:
            await self._until(lambda: aim.hit or aim.at(self._find_active()))
            aim.kill()
        finally:
            aim.at(None)

    async def _freeze(self, fault: Planned) -> None:
        """Longer than the server waits for a sign of life, so that another relay has the slot when it wakes up."""
        relay = await self._active()
        struck = relay.incarnation
        relay.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            if relay.incarnation == struck:
                relay.signal(signal.SIGCONT)

    async def _end_the_stream(self, fault: Planned) -> None:
        async with self._alone[self._database]:
            await self._until(self._database.end_stream)

    async def _drop_the_slot(self, fault: Planned) -> None:
        """What is committed until it is made again, no slot brings."""
        async with self._alone[self._database]:
            await self._until(self._database.drop_slot)
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(self._database.make_slot)

    async def _active(self) -> Member:
        """The relay that has the slot, at work."""
        found: list[Member] = []

        def seek() -> bool:
            active = self._find_active()
            found.extend([active] if active else [])
            return bool(found)

        await self._until(seek)
        return found[0]

    def _find_active(self) -> Member | None:
        title = self._holder()
        return next((each for each in self._crew.members if each.title == title and each.is_at_work), None)

    def _holder(self) -> str:
        try:
            return self._database.holder()
        except Exception:  # noqa: BLE001 - the database is away, by a fault that goes on
            return ""

    @property
    def _database(self) -> LoggedDatabase:
        return next(each for each in self._application.databases if isinstance(each, LoggedDatabase))
