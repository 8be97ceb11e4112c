"""The examples, run as their pages say, with processes that are killed in the middle."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.support.commands import SOON, line_of, until

FOLDER = Path(__file__).parents[2] / "examples" / "shipping"
ORDERS = 60  # that each start of the service places


class Services:
    """Processes of orders and of shipping, each with a database of its own."""

    def __init__(self, folder: Path, databases: dict[str, str], **settings: str) -> None:
        self.databases = databases
        self._folder = folder
        self._log = folder / "log"
        self._settings = settings
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, service: str, *arguments: str) -> subprocess.Popen[str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        # What a killed process held comes back when its lease has run out.
        settings = {"OUTBOX_LEASE": "3", "PYTHONWARNINGS": "error", **self._settings}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(FOLDER / f"{service}.py"), *arguments],
                cwd=self._folder,
                env=others | settings | self._own_settings(service),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        return process

    def _own_settings(self, service: str) -> dict[str, str]:
        """On SQLite the services are run without any."""
        url = self.databases[service]
        return {} if url.startswith("sqlite") else {"OUTBOX_DB_ENGINE_URL": url}

    async def lines(self, process: subprocess.Popen[str], count: int) -> None:
        """Wait until a process has printed so many lines more."""
        for _ in range(count):
            assert await asyncio.to_thread(line_of, process), self._log.read_text()

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    async def ids(self, service: str) -> list[str]:
        """What is in the service's own table, as anybody else would look at it."""
        async with engine(self.databases[service]) as looking, looking.connect() as connection:
            column, table = ("id", "orders") if service == "orders" else ("order_id", "shipments")
            return list(await connection.scalars(text(f"SELECT {column} FROM {table}")))

    async def shipments_of_all(self, orders: list[str]) -> bool:
        return set(orders) <= set(await self.ids("shipping"))


@asynccontextmanager
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(url)
    yield made
    await made.dispose()


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Services]:
    databases = {name: f"sqlite+aiosqlite:///{tmp_path / name}.db" for name in ("orders", "shipping")}
    services = Services(tmp_path, databases)
    yield services
    services.kill_all()


@pytest.fixture
def on_postgresql_with_rabbitmq(tmp_path: Path, postgresql_url: str, rabbitmq_url: str) -> Iterator[Services]:
    names = {service: f"{service}_{os.getpid()}" for service in ("orders", "shipping")}
    server = urlsplit(postgresql_url)._replace(scheme="postgresql+asyncpg")
    databases = {service: urlunsplit(server._replace(path=f"/{name}")) for service, name in names.items()}
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        for name in names.values():
            connection.execute(f"CREATE DATABASE {name}")
        services = Services(tmp_path, databases, OUTBOX_TRANSPORT=rabbitmq_url)
        yield services
        services.kill_all()
        for name in names.values():
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["on_sqlite", "on_postgresql_with_rabbitmq"])
def services(request: pytest.FixtureRequest) -> Services:
    made: Services = request.getfixturevalue(request.param)
    return made


def test_the_page_of_the_example_names_its_programs() -> None:
    named = re.findall(r"python (\w+\.py)", (FOLDER / "README.md").read_text())
    assert set(named) == {path.name for path in FOLDER.glob("*.py")}


async def test_each_order_is_shipped_once_although_both_services_are_killed(services: Services) -> None:
    shipping = services.start("shipping")
    placing = services.start("orders", str(ORDERS))
    await services.lines(placing, ORDERS // 2)
    placing.kill()  # while it places orders

    orders = services.start("orders", str(ORDERS))
    await services.lines(shipping, 10)
    shipping.kill()  # while it ships one
    orders.kill()  # while it hands messages over

    shipping = services.start("shipping")
    orders = services.start("orders", str(ORDERS))
    await services.lines(orders, ORDERS)
    placed = await services.ids("orders")
    await until(lambda: services.shipments_of_all(placed))

    for process in (orders, shipping):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON)
        assert process.returncode == 0
    assert sorted(await services.ids("shipping")) == sorted(placed)
    assert len(placed) >= 2 * ORDERS
