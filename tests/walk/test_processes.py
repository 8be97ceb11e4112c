"""Real processes on one database: races, kills at the worst moments, and twenty thousand messages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from outbox import Outbox
from tests.seeds.observing import let_leases_run_out

ROOT = Path(__file__).parents[2]
SOON = 120.0  # seconds: processes start slowly on a busy machine


class Shop:
    """Processes of tests/walk/shop.py on one database."""

    def __init__(self, folder: Path, url: str, table_name: str) -> None:
        self._folder = folder
        self.journal = folder / "journal"
        self._environment = {
            **os.environ,
            "OUTBOX_DB_ENGINE_URL": url,
            "OUTBOX_TABLE_NAME": table_name,
            "SHOP_JOURNAL": str(self.journal),
            "DIE_ONCE": str(folder / "died"),
            "PYTHONWARNINGS": "error",
        }
        self.table_name = table_name
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"log-{len(self.processes)}-{command[0]}").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.walk.shop", *command],
            cwd=ROOT,
            env=self._environment | environment,
            stdout=log,
            stderr=log,
        )
        log.close()
        self.processes.append(process)
        return process

    def run(self, *command: str) -> None:
        assert self.start(*command).wait(SOON) == 0, self.logs()

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(SOON)

    def set(self, **environment: str) -> None:
        """For all processes that start from now on."""
        self._environment |= environment

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def live_again(self) -> None:
        """Let the next process die where the last one did."""
        (self._folder / "died").unlink(missing_ok=True)

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("log-*")))

    def journalled(self) -> list[int]:
        return [int(line) for line in self.journal.read_text().split()] if self.journal.exists() else []


@pytest.fixture
def shop(tmp_path: Path, database_url: str, table_name: str) -> Iterator[Shop]:
    shop = Shop(tmp_path, database_url, table_name)
    try:
        shop.run("tables")
        yield shop
    finally:
        shop.kill()


async def effects(outbox: Outbox, shop: Shop) -> Counter[int]:
    async with outbox.transaction() as session:
        rows = await session.execute(text(f"SELECT body, count(*) FROM {shop.table_name}_effects GROUP BY body"))
        return Counter(dict(tuple(row) for row in rows))


async def emptied(outbox: Outbox) -> None:
    """Wait until nothing waits and nothing lies in a queue."""
    async with asyncio.timeout(SOON):
        while True:
            backlog = await outbox.backlog()
            if not backlog.waiting and not any(queue.delivered + queue.retrying for queue in backlog.queues):
                return
            await asyncio.sleep(0.1)


@contextmanager
def no_surprises(shop: Shop) -> Iterator[None]:
    yield
    logs = shop.logs()
    for word in ("locked", "Traceback", "lease lost", "Troubled"):
        assert word not in logs, logs[-3000:]


MOMENTS = [
    "listener",
    "before settle",
    "after settle",
    "before the settling statement",
    "after the settling statement",
    "before the claiming statement",
    "after the claiming statement",
    "before routing",
    "after routing",
]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_at_any_moment_loses_nothing_and_repeats_no_effect(
    moment: str, outbox: Outbox, shop: Shop
) -> None:
    shop.run("produce", "0", "40", "10")
    doomed = shop.start("worker", DIE_AT=moment)
    assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
    shop.start("worker", SHOP_LEASE="30")
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(40), 1))
    assert set(shop.journalled()) == set(range(40)), "effects outside of the session happen at least once"
    assert await outbox.dead_letters.list() == []


async def test_a_message_that_kills_every_worker_is_dead_and_condemns_no_other(outbox: Outbox, shop: Shop) -> None:
    shop.run("produce", "0", "5", "5")
    for _ in range(3):
        shop.live_again()
        doomed = shop.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
        assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
        await let_leases_run_out(outbox)
    shop.live_again()
    shop.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
    await emptied(outbox)
    [letter] = await outbox.dead_letters.list()
    assert (letter.message.body, letter.reason, letter.crash_count) == (b"3", "crashed", 3)
    assert await effects(outbox, shop) == Counter(dict.fromkeys((0, 1, 2, 4), 1))


async def test_two_workers_race_for_every_message_and_neither_repeats_one(outbox: Outbox, shop: Shop) -> None:
    workers = [shop.start("worker", "ledger", SHOP_LEASE="30") for _ in range(2)]
    shop.run("produce", "0", "400", "20")
    with no_surprises(shop):
        await emptied(outbox)
        shop.stop()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(400), 1))


async def test_twenty_thousand_messages_through_several_processes(outbox: Outbox, shop: Shop) -> None:
    """A producer, two workers and, where several can write at once, a relay of its own beside them."""
    beside = [] if "sqlite" in str(outbox.engines.main.url) else [shop.start("relay", SHOP_LEASE="60")]
    workers = [shop.start("worker", "journal", SHOP_LEASE="60") for _ in range(2)]
    with no_surprises(shop):
        producer = shop.start("produce", "0", "20000", "100")
        assert await asyncio.to_thread(producer.wait, SOON) == 0, shop.logs()[-2000:]
        await emptied(outbox)
        shop.stop()
    assert [process.returncode for process in workers + beside] == [0] * len(workers + beside)
    journal = shop.journalled()
    assert len(journal) == 20_000
    assert set(journal) == set(range(20_000))
