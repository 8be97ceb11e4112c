"""A standby is promoted under load, and the relay that reads the log goes on there.

From PostgreSQL 17 on the standby has the slot. Before, it has none, and `outbox wal create` makes it again.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from outbox import Outbox
from outbox.testing.servers import PostgreSQL
from tests.chaos.standby import STANDBY, Twin
from tests.support.proxy import Proxy

ROOT = Path(__file__).parents[2]
SOON = 60.0  # seconds
BEHIND = 0.3  # seconds for which the standby gets nothing before the primary dies
LOAD = 60  # transactions that are committed before each failover and after the last one
KEEPS_SLOTS = 17  # the first version whose standbys can have the slot of a primary

RELAY = """
import asyncio, os, sys
from outbox import Outbox

async def publish(message):
    os.write(1, message.body + b"\\n")

outbox = Outbox(
    db_engine_url=sys.argv[1], transport=publish, relay_from="wal", slot_in_use_delay=0.2, restart_delay=0.2,
    poll_interval=0.2,
)
asyncio.run(outbox.message_relay())
"""

pytestmark = pytest.mark.timeout(300)


class Servers:
    """A primary and a standby that a commit waits for; after a failover, the promoted one and a new standby."""

    def __init__(self, stack: ExitStack) -> None:
        proxy = stack.enter_context(Proxy())
        self._stack = stack
        self._replication = proxy.link(STANDBY)
        self.version = version()
        self.primary = stack.enter_context(Twin(self._settings))
        self.link = proxy.link("relay-0.1", self.primary.port)
        self.standby = self._follower()

    @property
    def keeps_slots(self) -> bool:
        return self.version >= KEEPS_SLOTS

    @property
    def _settings(self) -> Mapping[str, str]:
        """As docs/operate/wal.md says."""
        settings = {"synchronous_standby_names": STANDBY, "hot_standby_feedback": "on", "primary_slot_name": STANDBY}
        if self.version >= KEEPS_SLOTS:
            settings |= {"sync_replication_slots": "on", "synchronized_standby_slots": STANDBY}
        return settings

    def _follower(self) -> Twin:
        self._replication.server_ports = (self.primary.port,)
        ask(self.primary, f"SELECT pg_create_physical_replication_slot('{STANDBY}')")
        standby = self._stack.enter_context(Twin(self._settings, self._replication, self.primary))
        until(lambda: ask(self.primary, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"))
        return standby

    def until_slot_follows(self) -> None:
        """Until the standby could go on with the relay's slot."""
        if self.keeps_slots:
            slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical' AND NOT temporary"
            until(lambda: ask(self.standby, f"{slots} AND synced"))

    def fail_over(self) -> None:
        """Kill the primary while its standby is behind, and have the standby take over. It gets a standby in turn."""
        self._replication.swallow()
        time.sleep(BEHIND)
        self.primary.kill()
        ask(self.standby, "SELECT pg_promote()")
        self._replication.heal()
        self.primary = self.standby
        self.link.server_ports = (self.primary.port,)

    def follow_again(self) -> None:
        self.standby = self._follower()


class Load:
    """One producer, whose transactions follow each other; each has a row of its own beside its message."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.committed: list[int] = []  # as it was told
        self._number = 0

    async def produce(self) -> None:
        while True:
            self._number += 1
            with suppress(Exception):  # no server, or one that was killed before it answered
                async with asyncio.timeout(SOON), self._outbox.transaction() as session:
                    await session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": self._number})
                    await self._outbox.emit(session, "order.created", str(self._number).encode())
                self.committed.append(self._number)
            await asyncio.sleep(0.005)


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


async def test_relays_go_on_at_a_promoted_server_and_nothing_is_lost(servers: Servers, tmp_path: Path) -> None:
    """Twice, by way of a proxy that leads to the primary of the moment; two relays, one of which stands by."""
    url = f"postgresql+asyncpg://outbox@127.0.0.1:{servers.link.port}/postgres"
    async with shop(url) as outbox, load(outbox) as produced:
        with relays(url, tmp_path, 2):
            for _ in range(2):
                await asyncio.to_thread(servers.until_slot_follows)
                await produced.more()
                await fail_over(servers, outbox)
            await produced.more()
            produced.stop()
            await emptied(outbox)
    check(servers, produced.load, tmp_path)


async def test_a_url_with_several_hosts_leads_to_the_promoted_server(servers: Servers, tmp_path: Path) -> None:
    hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in (servers.primary, servers.standby))
    url = f"postgresql+asyncpg://outbox@/postgres?{hosts}&target_session_attrs=read-write"
    async with shop(url) as outbox, load(outbox) as produced:
        with relays(url, tmp_path, 1):
            await asyncio.to_thread(servers.until_slot_follows)
            await produced.more()
            await fail_over(servers, outbox)
            await produced.more()
            produced.stop()
            await emptied(outbox)
    check(servers, produced.load, tmp_path)


async def fail_over(servers: Servers, outbox: Outbox) -> None:
    await asyncio.to_thread(servers.fail_over)
    status = await at_last(outbox.wal.status)
    assert status.exists is servers.keeps_slots
    await asyncio.to_thread(servers.follow_again)  # a commit waits for it
    if not servers.keeps_slots:
        assert "outbox wal create" in status.problems[0]
        await at_last(outbox.wal.create)


def check(servers: Servers, load: Load, folder: Path) -> None:
    delivered = [int(number) for number in (folder / "delivered").read_text().split()]
    there = {int(number) for number in ask_all(servers.primary, "SELECT number FROM orders")}
    assert set(load.committed) <= there, "a commit waits for the standby"
    assert not there - set(delivered), "lost"
    if servers.keeps_slots:
        assert not set(delivered) - there, "nothing is sent that the standby has not"
        first = list(dict.fromkeys(delivered))
        assert first == sorted(first), "first deliveries in commit order"


# --- what they run


@asynccontextmanager
async def shop(url: str) -> AsyncIterator[Outbox]:
    outbox = Outbox(db_engine_url=url, relay_from="wal", transport=no_transport)
    await outbox.create_tables()
    async with outbox.transaction() as session:
        await session.execute(text("CREATE TABLE orders (number integer PRIMARY KEY)"))
    await outbox.wal.create()
    yield outbox
    await outbox.close()


async def no_transport(message: object) -> None:
    raise AssertionError("only the relays' processes deliver")


class Produced:
    def __init__(self, load: Load, task: asyncio.Task[None]) -> None:
        self.load = load
        self._task = task

    async def more(self) -> None:
        """Wait for further commits."""
        enough = len(self.load.committed) + LOAD
        async with asyncio.timeout(SOON):
            while len(self.load.committed) < enough:
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._task.cancel()


@asynccontextmanager
async def load(outbox: Outbox) -> AsyncIterator[Produced]:
    its_load = Load(outbox)
    task = asyncio.create_task(its_load.produce())
    yield Produced(its_load, task)
    task.cancel()
    await asyncio.wait([task])


@contextmanager
def relays(url: str, folder: Path, count: int) -> Iterator[None]:
    with (folder / "delivered").open("ab") as delivered, (folder / "log").open("ab") as log:
        started = [
            subprocess.Popen([sys.executable, "-c", RELAY, url], cwd=ROOT, stdout=delivered, stderr=log)
            for _ in range(count)
        ]
        try:
            yield
            assert [each.poll() for each in started] == [None] * count, (folder / "log").read_text()
        finally:
            for each in started:
                each.kill()
                each.wait()


async def emptied(outbox: Outbox) -> None:
    async with asyncio.timeout(SOON):
        while await at_last(lambda: outbox.messages(limit=1)):
            await asyncio.sleep(0.1)


async def at_last(ask_for: Callable[[], Any]) -> Any:
    """What it says once its connections lead to a server that is there."""
    deadline = time.monotonic() + SOON
    while True:
        try:
            return await ask_for()
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


def ask(server: PostgreSQL, statement: str) -> Any:
    return next(iter(ask_all(server, statement)), None)


def ask_all(server: PostgreSQL, statement: str) -> list[Any]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def version() -> int:
    """Of the programs that servers here are run by."""
    command = [str(PostgreSQL().programs.folder / "postgres"), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+", told)
    assert found is not None
    return int(found[0])
