"""The shop and the warehouse of the examples, over real HTTP, and one of them killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.commands import SOON, until

FOLDER = Path(__file__).parents[2] / "examples" / "orders"
ORDERS = 30


class Shop:
    """Where customers order, and what is in the two databases."""

    def __init__(self, folder: Path, ports: tuple[int, int]) -> None:
        self.ports = ports
        self._folder = folder
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=SOON)

    def order(self, order_id: str, cents: int = 14999) -> int:
        """The status code of the answer."""
        document = {"order_id": order_id, "customer_email": "customer@example.com", "cents": cents}
        return int(self.client.post("/orders", json=document).status_code)

    def is_up(self) -> bool:
        try:
            return self.client.get("/orders/none").status_code == 404
        except httpx2.TransportError:
            return False

    def rows(self, service: str, statement: str) -> list[Any]:
        with closing(sqlite3.connect(f"file:{self._folder / service}.db?mode=rw", uri=True)) as connection:
            return connection.execute(statement).fetchall()

    def reservations(self) -> list[str]:
        try:
            return sorted(order_id for (order_id,) in self.rows("warehouse", "SELECT order_id FROM reservations"))
        except sqlite3.OperationalError:  # nobody has made the file or its table yet
            return []

    def statuses(self) -> dict[str, str]:
        return dict(self.rows("shop", "SELECT order_id, status FROM orders"))

    def is_settled(self) -> bool:
        return "pending" not in self.statuses().values()


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OUTBOX_LEASE", "3")
    monkeypatch.setenv("STOCK", str(ORDERS - 1))


@pytest.fixture
def ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def shop(surroundings: None, tmp_path: Path, ports: tuple[int, int]) -> Iterator[Shop]:
    shop = Shop(tmp_path, ports)
    with shop.client:
        yield shop


@pytest.fixture
def served(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    """Both services, started with one command."""
    process = subprocess.Popen([sys.executable, str(FOLDER / "serve.py"), *map(str, shop.ports)])
    yield process
    process.send_signal(signal.SIGINT)
    process.wait(SOON)


def test_the_page_of_the_orders_names_its_programs() -> None:
    named = re.findall(r"`(\w+\.py)`", (FOLDER / "README.md").read_text())
    assert set(named) == {path.name for path in FOLDER.glob("*.py")}


async def test_orders_are_confirmed_or_refused_by_the_other_service(
    shop: Shop, served: subprocess.Popen[bytes]
) -> None:
    await until(shop.is_up)
    numbers = [f"ORD-{number}" for number in range(ORDERS)]
    assert {shop.order(number) for number in numbers} == {201}
    assert shop.order("ORD-0") == 409
    assert shop.order("ORD-rich", cents=100_001) == 402
    await until(shop.is_settled)
    statuses = shop.statuses()
    assert set(statuses) == set(numbers)
    assert sorted(statuses.values()) == ["confirmed"] * (ORDERS - 1) + ["refused"]
    assert shop.reservations() == sorted(order_id for order_id, status in statuses.items() if status == "confirmed")
    assert shop.rows("shop", "SELECT * FROM outbox_table_dead_letters") == []
    served.send_signal(signal.SIGTERM)
    assert served.wait(SOON) == 0


async def test_each_order_is_reserved_once_although_both_services_are_killed(shop: Shop) -> None:
    specification = importlib.util.spec_from_file_location("serve", FOLDER / "serve.py")
    assert specification is not None and specification.loader is not None
    serve = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(serve)
    settings = serve.settings(*shop.ports)
    processes: list[subprocess.Popen[bytes]] = []

    def start(position: int) -> subprocess.Popen[bytes]:
        processes.append(serve.start(("shop", "warehouse")[position], shop.ports[position], settings))
        return processes[-1]

    try:
        selling = start(0)
        await until(shop.is_up)
        for number in range(ORDERS // 2):
            assert shop.order(f"ORD-{number}") == 201  # the warehouse is not there yet
        storing = start(1)
        await until(shop.reservations)
        storing.kill()  # while it reserves
        selling.kill()  # while it hands messages over
        start(0)
        start(1)
        await until(shop.is_up)
        for number in range(ORDERS // 2, ORDERS - 1):
            assert shop.order(f"ORD-{number}") == 201
        await until(shop.is_settled)
        assert set(shop.statuses().values()) == {"confirmed"}
        assert shop.reservations() == sorted(f"ORD-{number}" for number in range(ORDERS - 1))
    finally:
        for process in processes:
            process.kill()
            process.wait()
