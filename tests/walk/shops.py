"""Shops: processes of tests/walk/shop.py, and what they did."""

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

from sqlalchemy import text

from outbox import Outbox

from .effects import effects_table

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

    async def make_tables(self, outbox: Outbox) -> None:
        async with outbox.engines.asynchronous.begin() as connection:
            await connection.run_sync(effects_table(self.table_name).metadata.create_all)
        await outbox.create_tables()

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


async def effects(outbox: Outbox, shop: Shop) -> Counter[int]:
    async with outbox.transaction() as session:
        rows = await session.execute(text(f"SELECT body, count(*) FROM {shop.table_name}_effects GROUP BY body"))
        return Counter(dict(tuple(row) for row in rows))


async def emptied(outbox: Outbox) -> None:
    """Wait until nothing waits and nothing lies in a queue of the database."""
    async with asyncio.timeout(SOON):
        while True:
            backlog = await outbox.store.inspection.backlog()
            if not backlog.waiting and not any(queue.open for queue in backlog.queues):
                return
            await asyncio.sleep(0.1)


@contextmanager
def no_surprises(shop: Shop) -> Iterator[None]:
    yield
    logs = shop.logs()
    for word in ("locked", "Traceback", "lease lost", "Troubled"):
        assert word not in logs, logs[-3000:]
