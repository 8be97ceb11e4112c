"""The sagas of the examples, run as their page says, and killed in the middle."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import SOON, line_of

FOLDER = Path(__file__).parents[2] / "examples" / "saga"
ORDERS = 60


class Saga:
    """One of the programs, in a folder of its own."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        return subprocess.Popen(
            [sys.executable, str(FOLDER / f"{self._program}.py"), *arguments],
            cwd=self._folder,
            env=others | {"OUTBOX_LEASE": "3", "PYTHONWARNINGS": "error"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> list[str]:
        """What it prints, to its end."""
        process = self.start(*arguments)
        try:
            printed, _ = process.communicate(timeout=SOON)
        finally:
            process.kill()
        assert process.returncode == 0, printed
        return printed.splitlines()

    def rows(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self._folder / f"{self._program}.db")) as connection:
            return connection.execute(statement).fetchall()


@pytest.fixture
def ordering(tmp_path: Path) -> Saga:
    return Saga(tmp_path, "ordering")


@pytest.fixture
def booking(tmp_path: Path) -> Saga:
    return Saga(tmp_path, "booking")


def test_the_page_of_the_sagas_names_their_programs() -> None:
    named = re.findall(r"python (\w+\.py)", (FOLDER / "README.md").read_text())
    assert set(named) == {path.name for path in FOLDER.glob("*.py")}


def test_an_order_goes_from_step_to_step_and_back_if_one_is_refused(ordering: Saga) -> None:
    printed = ordering.run("3")
    told = {number: {line.split()[1] for line in printed if line.startswith(f"ORD-{number} ")} for number in (1, 2, 3)}
    assert told[1] == {"order.placed", "inventory.reserved", "payment.charged", "order.shipped", "order.completed"}
    assert told[2] == {
        *("order.placed", "inventory.reserved", "payment.refused"),
        *("inventory.released", "order.failed", "order.cancelled"),
    }
    assert told[3] == {"order.placed", "order.failed", "order.cancelled"}
    assert printed[-3:] == ["cancelled 2", "completed 1", "stock 999"]


def test_no_order_is_lost_or_done_twice_although_the_program_is_killed(ordering: Saga) -> None:
    process = ordering.start(str(ORDERS))
    for _ in range(ORDERS // 3):
        assert line_of(process)
    process.kill()  # in the middle of many sagas
    process.communicate()

    ordering.run("0")
    ended = dict(ordering.rows("SELECT status, count(*) FROM orders GROUP BY status"))
    assert set(ended) == {"completed", "cancelled"}
    completed = sorted(ordering.rows("SELECT id FROM orders WHERE status = 'completed'"))
    assert sorted(ordering.rows("SELECT order_id FROM payments")) == completed
    assert sorted(ordering.rows("SELECT order_id FROM shipments")) == completed
    assert ordering.rows("SELECT pieces FROM stock") == [(1000 - ended["completed"],)]


def test_a_booking_whose_flight_fails_for_good_gives_its_hotel_back(booking: Saga) -> None:
    printed = booking.run("Rome", "Atlantis")
    assert printed[-2:] == ["B-1 Rome confirmed HOTEL-B-1", "B-2 Atlantis cancelled None"]
    assert "B-2 hotel.cancelled" in printed
    assert booking.rows("SELECT booking_id FROM flights") == [("B-1",)]
    assert booking.rows("SELECT reason, attempts FROM outbox_table_dead_letters") == [("exhausted", 3)]
