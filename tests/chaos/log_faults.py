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
from tests.support.proxy import CONFIRM

Until = Callable[[Callable[[], object]], Awaitable[None]]


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
        relay = await self._active()
        link, struck = relay.broker_link, relay.incarnation
        assert link is not None
        link.trip_at((CONFIRM,), hangs=True)
        try:
            await self._until(link.tripped.is_set)
            if relay.incarnation == struck:
                relay.signal(signal.SIGKILL)
        finally:
            link.trip_at(())
            link.heal()

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
            title = self._holder()
            found[:] = [each for each in self._crew.members if each.title == title and each.is_at_work]
            return bool(found)

        await self._until(seek)
        return found[0]

    def _holder(self) -> str:
        try:
            return self._database.holder()
        except Exception:  # noqa: BLE001 - the database is away, by a fault that goes on
            return ""

    @property
    def _database(self) -> LoggedDatabase:
        return next(each for each in self._application.databases if isinstance(each, LoggedDatabase))
