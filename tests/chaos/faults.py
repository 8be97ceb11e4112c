"""Faults: each kind as a coroutine that lasts as long as the fault does, and leaves the world mended.

A fault waits for something to strike: a process at work, a connection, a commit. If none comes, it raises `Missed`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from operator import methodcaller

from tests.chaos.application import Application
from tests.chaos.broker import Broker, SingleNode
from tests.chaos.cluster import Cluster, Node
from tests.chaos.database import Database, ServerDatabase
from tests.chaos.doorway import NO_ANSWER, REFUSALS, TAKEN, Doorway
from tests.chaos.log_faults import LogFaults
from tests.chaos.mariadb import MariadbDatabase
from tests.chaos.processes import RELAY, WORKER, Crew, Member
from tests.chaos.schedule import Planned
from tests.chaos.standby import PostgresqlPair
from tests.support.proxy import CONFIRM, Link

HOUR = 3600.0
CRASH, STOP = methodcaller("crash"), methodcaller("stop")
STRIKE_WITHIN = 20.0  # seconds
BACK_WITHIN = 60.0  # seconds, for a queue whose workers may be struck by other faults meanwhile
LOOK_EVERY = 0.05  # seconds


class Missed(Exception):
    """There was nothing to strike."""


class Faults:
    """Does what the schedule says."""

    def __init__(self, crew: Crew, application: Application) -> None:
        self._crew = crew
        self._application = application
        self._alone = {database: asyncio.Lock() for database in application.databases}  # down for one reason at a time
        self._broker_alone = asyncio.Lock()
        self._doorway_alone = asyncio.Lock()
        self._ways: Mapping[str, Callable[[Planned], Awaitable[None]]] = {
            "kill a producer": self._kill,
            "kill a relay": self._kill,
            "kill a worker": self._kill,
            "freeze": self._freeze,
            "rolling restart": self._rolling_restart,
            "wrong clock": self._wrong_clock,
            "full disk": self._full_disk,
            "crash the database": self._crash,
            "restart the database": self._restart,
            "end sessions": self._end_sessions,
            "deadlock": self._deadlock,
            "cut": self._cut,
            "black hole": self._black_hole,
            "delay": self._delay,
            "cut at commit": self._cut_at_commit,
            "cut at write": self._cut_at_write,
            "crash the broker": self._crash_broker,
            "restart the broker": self._restart_broker,
            "memory alarm": self._memory_alarm,
            "delete a binding": self._delete_a_binding,
            "delete a queue": self._delete_a_queue,
            "cut from the broker": self._cut_from_the_broker,
            "black hole to the broker": self._black_hole_to_the_broker,
            "cut at confirm": self._cut_at_confirm,
            "kill the leader": self._kill_the_leader,
            "kill a node": self._kill_a_node,
            "restart a node": self._restart_a_node,
            "fail over": self._fail_over,
            "crash everything": self._crash_everything,
            "restart everything": self._restart_everything,
            "unreachable": self._unreachable,
            "silence": self._silence,
            "turned away": self._turned_away,
            "resets": self._resets,
            "cut from the receiver": self._cut_from_the_receiver,
            "cut at answer": self._cut_at_answer,
            **LogFaults(crew, application, self._alone, _until).ways,
        }

    async def strike(self, fault: Planned) -> None:
        await self._ways[fault.kind](fault)

    # Processes.

    async def _kill(self, fault: Planned) -> None:
        (await self._at_work(fault)).signal(signal.SIGKILL)

    async def _freeze(self, fault: Planned) -> None:
        """Longer than a lease, so that it wakes up with work that is no longer its own."""
        member = await self._at_work(fault)
        frozen = member.incarnation
        member.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            if member.incarnation == frozen:
                member.signal(signal.SIGCONT)

    async def _rolling_restart(self, fault: Planned) -> None:
        """One after another, as a deployment would."""
        for member in self._crew.of(RELAY, WORKER):
            await member.stop()

    async def _wrong_clock(self, fault: Planned) -> None:
        """From now on its clock is an hour off, until its end."""
        await self._crew.named(fault.target).replace(HOUR if fault.chance < 0.5 else -HOUR)

    # The database.

    async def _full_disk(self, fault: Planned) -> None:
        database = self._database(fault)
        async with self._alone[database]:
            try:
                await asyncio.to_thread(database.disk.fill)
                await asyncio.sleep(fault.seconds)
            finally:
                database.disk.free()
                if isinstance(database, ServerDatabase):
                    await asyncio.to_thread(database.recover)

    async def _crash(self, fault: Planned) -> None:
        server = self._server(fault)
        async with self._alone[server]:
            await _away(CRASH, fault.seconds, server)

    async def _restart(self, fault: Planned) -> None:
        server = self._server(fault)
        async with self._alone[server]:
            await _away(STOP, fault.seconds, server)

    async def _fail_over(self, fault: Planned) -> None:
        """The primary dies, for good, while its standby is behind, and the standby takes over."""
        pair = self._server(fault)
        assert isinstance(pair, PostgresqlPair)
        async with self._alone[pair]:
            pair.hold_back()
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(pair.fail_over)

    async def _end_sessions(self, fault: Planned) -> None:
        server = self._server(fault)
        async with self._alone[server]:
            await _until(lambda: server.terminate_backends(max(0.2, fault.chance)))

    async def _deadlock(self, fault: Planned) -> None:
        """Another program locks what ours need, in the other order, and the server ends one of ours."""
        database = self._database(fault)
        assert isinstance(database, MariadbDatabase)
        async with self._alone[database]:
            await _until(database.provoke_deadlocks)

    # The network.

    async def _cut(self, fault: Planned) -> None:
        await _until(self._link(fault).cut)

    async def _black_hole(self, fault: Planned) -> None:
        await _swallow(self._link(fault), fault.seconds)

    async def _delay(self, fault: Planned) -> None:
        link = self._link(fault)
        link.slow_down(0.02 + 0.2 * fault.chance)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            link.heal()

    async def _cut_at_commit(self, fault: Planned) -> None:
        """The server has committed, and its client does not hear of it."""
        await self._trip(fault, "COMMIT")

    async def _cut_at_write(self, fault: Planned) -> None:
        """A claim, a settlement or an emit was carried out, and its client does not hear of it."""
        await self._trip(fault, "UPDATE", "DELETE", "INSERT")

    # The broker.

    async def _crash_broker(self, fault: Planned) -> None:
        async with self._broker_alone:
            await _away(CRASH, fault.seconds, self._single_node)

    async def _restart_broker(self, fault: Planned) -> None:
        async with self._broker_alone:
            await _away(STOP, fault.seconds, self._single_node)

    async def _kill_the_leader(self, fault: Planned) -> None:
        await self._one_node_away(fault, self._cluster.kill_leader)

    async def _kill_a_node(self, fault: Planned) -> None:
        await self._one_node_away(fault, lambda: self._cluster.kill(self._node(fault)))

    async def _restart_a_node(self, fault: Planned) -> None:
        await self._one_node_away(fault, lambda: self._cluster.stop(self._node(fault)))

    async def _one_node_away(self, fault: Planned, end: Callable[[], Node]) -> None:
        """The others have a majority, and take over what it led."""
        async with self._broker_alone:
            node = await asyncio.to_thread(end)
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(self._cluster.start, node)

    async def _memory_alarm(self, fault: Planned) -> None:
        """Nobody may publish, until there is memory again."""
        async with self._broker_alone:
            await asyncio.to_thread(self._broker.alarm, True)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                await asyncio.to_thread(self._broker.alarm, False)

    async def _delete_a_binding(self, fault: Planned) -> None:
        """For a while some messages go nowhere; then an operator mends it."""
        async with self._broker_alone:
            await asyncio.to_thread(self._broker.unbind)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                await asyncio.to_thread(self._broker.bind)

    async def _delete_a_queue(self, fault: Planned) -> None:
        """Its worker makes it again, without being told."""
        async with self._broker_alone:
            await asyncio.to_thread(self._broker.delete_queue)
            try:
                await _until(self._broker.is_queue_back, BACK_WITHIN)
            except Missed:
                raise RuntimeError(f"a deleted queue is not consumed again after {BACK_WITHIN:g} s") from None

    async def _cut_from_the_broker(self, fault: Planned) -> None:
        await _until(self._broker_link(fault).cut)

    async def _black_hole_to_the_broker(self, fault: Planned) -> None:
        await _swallow(self._broker_link(fault), fault.seconds)

    async def _cut_at_confirm(self, fault: Planned) -> None:
        """The broker has taken a message, and its publisher does not hear of it."""
        await _trip(self._broker_link(fault), CONFIRM)

    # The way to an application that takes messages over HTTP.

    async def _unreachable(self, fault: Planned) -> None:
        """Nobody listens where the relays connect to."""
        async with self._doorway_alone:
            for link in self._doorway.links:
                link.leave()
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                for link in self._doorway.links:
                    await asyncio.to_thread(link.come_back)

    async def _silence(self, fault: Planned) -> None:
        """Requests vanish, and so do answers."""
        async with self._doorway_alone:
            await asyncio.gather(*(_swallow(link, fault.seconds) for link in self._doorway.links))

    async def _turned_away(self, fault: Planned) -> None:
        """Somebody on the way answers, and lets nobody in."""
        await self._answered(fault, REFUSALS[int(fault.chance * len(REFUSALS))])

    async def _resets(self, fault: Planned) -> None:
        """Every request that has come as a whole is answered with a reset connection."""
        await self._answered(fault, NO_ANSWER)

    async def _cut_from_the_receiver(self, fault: Planned) -> None:
        await _until(self._http_link(fault).cut)

    async def _cut_at_answer(self, fault: Planned) -> None:
        """The application has taken a message, and its relay does not hear of it."""
        await _trip(self._http_link(fault), TAKEN)

    async def _answered(self, fault: Planned, status: int) -> None:
        async with self._doorway_alone:
            for link in self._doorway.links:
                link.turn_away(status)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                for link in self._doorway.links:
                    link.heal()

    # All servers at once.

    async def _crash_everything(self, fault: Planned) -> None:
        async with self._all_alone():
            await _away(CRASH, fault.seconds, *self._servers, self._single_node)

    async def _restart_everything(self, fault: Planned) -> None:
        async with self._all_alone():
            await _away(STOP, fault.seconds, *self._servers, self._single_node)

    @asynccontextmanager
    async def _all_alone(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for lock in (*self._alone.values(), self._broker_alone):
                await stack.enter_async_context(lock)
            yield

    async def _trip(self, fault: Planned, *commands: str) -> None:
        await _trip(self._link(fault), *commands)

    async def _at_work(self, fault: Planned) -> Member:
        member = self._crew.named(fault.target)
        await _until(lambda: member.is_at_work)
        return member

    def _database(self, fault: Planned) -> Database:
        """The one that it strikes; where there are several, its target ends in a number."""
        _, _, number = fault.target.partition("-")
        return self._application.databases[int(number or 0)]

    def _server(self, fault: Planned) -> ServerDatabase:
        database = self._database(fault)
        assert isinstance(database, ServerDatabase)
        return database

    @property
    def _servers(self) -> list[ServerDatabase]:
        return [each for each in self._application.databases if isinstance(each, ServerDatabase)]

    @property
    def _broker(self) -> Broker:
        assert self._application.broker is not None
        return self._application.broker

    @property
    def _single_node(self) -> SingleNode:
        assert isinstance(self._broker, SingleNode)
        return self._broker

    @property
    def _cluster(self) -> Cluster:
        assert isinstance(self._broker, Cluster)
        return self._broker

    def _node(self, fault: Planned) -> Node:
        nodes = self._cluster.nodes
        return nodes[int(fault.chance * len(nodes))]

    def _link(self, fault: Planned) -> Link:
        link = self._crew.named(fault.target).link
        assert link is not None
        return link

    def _broker_link(self, fault: Planned) -> Link:
        link = self._crew.named(fault.target).broker_link
        assert link is not None
        return link

    @property
    def _doorway(self) -> Doorway:
        assert self._application.doorway is not None
        return self._application.doorway

    def _http_link(self, fault: Planned) -> Link:
        link = self._crew.named(fault.target).http_link
        assert link is not None
        return link


async def _away(end: methodcaller, seconds: float, *servers: ServerDatabase | SingleNode) -> None:
    """End them all at once, and start them again after a while."""
    await asyncio.gather(*(asyncio.to_thread(end, server) for server in servers))
    await asyncio.sleep(seconds)
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))


async def _swallow(link: Link, seconds: float) -> None:
    link.swallow()
    try:
        await asyncio.sleep(seconds)
    finally:
        link.heal()


async def _trip(link: Link, *commands: str) -> None:
    link.trip_at(commands)
    try:
        await _until(link.tripped.is_set)
    finally:
        link.trip_at(())


async def _until(condition: Callable[[], object], longest: float = STRIKE_WITHIN) -> None:
    deadline = time.monotonic() + longest
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise Missed
        await asyncio.sleep(LOOK_EVERY)
