"""What happens to servers and processes: nothing is lost, and first deliveries stay in commit order."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Outbox
from outbox.testing.servers import PostgreSQL
from tests.support.observing import Recorder

from .conftest import Place

ROOT = Path(__file__).parents[3]

RELAY = """
import asyncio, os, sys
from outbox import Outbox

async def publish(message):
    while os.path.exists(sys.argv[3]):
        await asyncio.sleep(0.05)
    os.write(1, message.body.split()[0] + b"\\n")
    await asyncio.sleep(0.001)

outbox = Outbox(
    db_engine_url=sys.argv[1], table_name=sys.argv[2], transport=publish, relay_from="wal", batch_size=7,
    slot_in_use_delay=0.2, restart_delay=0.2,
)
asyncio.run(outbox.message_relay())
"""


def start(shop: Outbox, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A relay as a process of its own, which writes down what it delivers."""
    arguments = [str(shop.settings.db_engine_url), shop.settings.table_name, str(folder / "stalled")]
    with (folder / "delivered").open("ab") as delivered, (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RELAY, *arguments],
            cwd=ROOT,
            stdout=delivered,
            stderr=log,
            env=os.environ | environment,
        )


@pytest.fixture
async def server() -> AsyncIterator[PostgreSQL]:
    settings = {"max_slot_wal_keep_size": "64MB", "max_wal_size": "64MB", "min_wal_size": "32MB"}
    with PostgreSQL(settings=settings) as server:
        yield server


@pytest.fixture
async def shop(server: PostgreSQL, table_name: str, place: Place, recorder: Recorder) -> AsyncIterator[Outbox]:
    outbox = Outbox(
        db_engine_url=server.url.replace("postgresql://", "postgresql+asyncpg://"),
        table_name=table_name,
        transport=place.publish,
        relay_from="wal",
        poll_interval=0.2,
        restart_delay=0.2,
        observers=[recorder],
    )
    await outbox.create_tables()
    await outbox.wal.create()
    yield outbox
    await outbox.close()


async def emit(outbox: Outbox, *bodies: str) -> None:
    async with outbox.transaction() as session:
        for body in bodies:
            await outbox.emit(session, "order.created", body.encode())


async def emptied(outbox: Outbox, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while await outbox.messages(limit=1):
            await asyncio.sleep(0.05)


async def test_killed_again_and_again_it_loses_nothing(shop: Outbox, tmp_path: Path) -> None:
    """kill -9 at any instant, with a standby that takes over; every tenth transaction is rolled back."""
    committed: list[str] = []

    async def produce() -> None:
        for number in range(1200):
            bodies = [f"{number}a", f"{number}b"]
            try:
                async with shop.transaction() as session:
                    for body in bodies:
                        await shop.emit(session, "order.created", body.encode())
                    if number % 10 == 9:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                continue
            committed.extend(bodies)
            await asyncio.sleep(0.005)

    relays = [start(shop, tmp_path), start(shop, tmp_path)]
    producing = asyncio.create_task(produce())
    chance = random.Random(7)
    try:
        for _ in range(5):
            await asyncio.sleep(chance.uniform(1.5, 3))
            active = relays.pop(0)
            active.send_signal(signal.SIGKILL)
            active.wait()
            relays.append(start(shop, tmp_path))
        await producing
        await emptied(shop)
    finally:
        for relay in relays:
            relay.kill()
            relay.wait()
    delivered = (tmp_path / "delivered").read_text().split()
    assert list(dict.fromkeys(delivered)) == committed, "0 lost, 0 phantom, first deliveries in commit order"


async def test_a_server_that_crashes_loses_nothing(server: PostgreSQL, shop: Outbox, place: Place) -> None:
    async with shop.running(relay=True):
        for number in range(40):
            if number in (10, 25):
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            async with asyncio.timeout(60):
                while True:
                    try:
                        await emit(shop, str(number))
                        break
                    except Exception:  # noqa: BLE001 - its pool has connections to the server that crashed
                        await asyncio.sleep(0.1)
        await emptied(shop)
    assert set(place.bodies) == {str(number) for number in range(40)}


@pytest.mark.parametrize("size", [1, 100_000], ids=["the stream goes on", "the stream is paused"])
async def test_a_server_stops_although_its_messages_are_not_confirmed(
    server: PostgreSQL, shop: Outbox, place: Place, size: int
) -> None:
    """It ends every other session, and waits for whoever reads its log to confirm what it sent."""
    bodies = [f"{number} {'x' * size}"[: max(size, 3)] for number in range(100)]
    async with shop.running(relay=True):
        place.opened.clear()
        await emit(shop, *bodies)
        async with asyncio.timeout(20):
            while not place.asked:
                await asyncio.sleep(0.02)
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(server.stop)
        assert asyncio.get_running_loop().time() - began < 30
        await asyncio.to_thread(server.start)
        place.opened.set()
        await emptied(shop)
    assert {int(body.split()[0]) for body in place.bodies} == set(range(100))


async def test_a_slot_that_needs_too_much_is_lost_and_no_message_is(
    shop: Outbox, place: Place, recorder: Recorder
) -> None:
    async with shop.running(relay=True):
        await emit(shop, "before")
        await place.until(1)
        await emptied(shop)
    await emit(shop, "missed")
    engine = create_async_engine(shop.engines.main.url).execution_options(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text("CREATE TABLE filler (t text)"))
        async with asyncio.timeout(60):
            while (await shop.wal.status()).wal_status != "lost":
                numbers = "generate_series(1, 300000) n"
                fill = f"INSERT INTO filler SELECT string_agg(md5(n::text || random()), '') FROM {numbers}"
                await connection.execute(text(fill))
                await connection.execute(text("CHECKPOINT"))
    await engine.dispose()
    [problem] = (await shop.wal.status()).problems
    assert "is lost" in problem and "outbox wal create --recreate" in problem
    assert len(await shop.wal.create(recreate=True)) == 2
    await emit(shop, "after")
    async with shop.running(relay=True):
        await place.until(3)
        await emptied(shop)
    assert place.bodies == ["before", "missed", "after"] or sorted(place.bodies) == ["after", "before", "missed"]


async def test_a_destination_that_stalls_costs_neither_the_connection_nor_memory(shop: Outbox, tmp_path: Path) -> None:
    """Longer than wal_sender_timeout, behind a transaction of 150 MB: the stream is paused."""
    stalled = tmp_path / "stalled"
    relay = start(shop, tmp_path, OUTBOX_WAL_URL=f"{shop.settings.db_engine_url}?options=-c wal_sender_timeout=2s")
    try:
        await emit(shop, "1500")  # after it, all modules are loaded
        await emptied(shop)
        stalled.touch()
        pid, before = (await shop.wal.status()).active_pid, resident(relay)
        body = "x" * 100_000
        async with shop.transaction() as session:
            for number in range(1500):
                await shop.emit(session, "order.created", f"{number} {body}".encode())
        for _ in range(12):
            await asyncio.sleep(0.5)
            assert resident(relay) - before < 50 * 1024
        stalled.unlink()
        await emptied(shop)
        assert (await shop.wal.status()).active_pid == pid
        assert resident(relay) - before < 50 * 1024
    finally:
        relay.kill()
        relay.wait()
    delivered = (tmp_path / "delivered").read_text().split()  # a function may be called for several at once
    assert sorted(map(int, delivered)) == list(range(1501))


def resident(process: subprocess.Popen[bytes]) -> int:
    """KiB of memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


async def test_a_standby_takes_over_from_a_relay_that_is_frozen(shop: Outbox, tmp_path: Path, place: Place) -> None:
    relay = start(shop, tmp_path)
    try:
        await emit(shop, "first")
        await emptied(shop)
        relay.send_signal(signal.SIGSTOP)
        await emit(shop, "second")
        async with shop.running(relay=True):
            await place.until(1)  # the server lets go of the frozen one after its wal_sender_timeout
            relay.send_signal(signal.SIGCONT)
            await emit(shop, "third")
            await emptied(shop)
        assert place.bodies[0] == "second"
    finally:
        relay.kill()
        relay.wait()
    assert set((tmp_path / "delivered").read_text().split()) | set(place.bodies) == {"first", "second", "third"}
