"""`outbox demo`: it does what it tells, its ledger can fail, and it leaves nothing behind but its file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.cli.demo.director import invent_orders
from outbox.cli.demo.ledger import Entry, Plan, balance
from outbox.cli.exits import ExitCode
from tests.support.commands import SOON, Command, Ran, line_of, until

CANARY = "canary-7hX2"
LONGEST = 3 * 20.0  # seconds: three times what the demo may take where nothing else runs


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Ran, float]:
    """A demo that was played once, in an environment with somebody's own settings."""
    settings = {"OUTBOX_DB_ENGINE_URL": f"postgresql://shop:{CANARY}@db/shop", "OUTBOX_TABLE_NAME": "theirs"}
    command = Command(tmp_path_factory.mktemp("demo"), settings)
    began = time.monotonic()
    ran = command.process("demo", "--seed", "7")
    return command, ran, time.monotonic() - began


def test_the_demo_balances_its_ledger_in_good_time(played: tuple[Command, Ran, float]) -> None:
    _, ran, seconds = played
    assert (ran.code, ran.stderr) == (0, "")
    assert "The ledger balances" in ran.stdout
    assert seconds < LONGEST


def test_the_demo_tells_its_story_in_plain_lines(played: tuple[Command, Ran, float]) -> None:
    _, ran, _ = played
    story = [line[7:] for line in ran.stdout.split("LEDGER")[0].splitlines() if line]
    for told in (
        r"the shop opens, in outbox-demo\.db \(seed 7\)",
        r"\d+ orders placed, \d+ rolled back; no worker runs yet: their messages wait",
        r"worker \d+ gets SIGKILL while it packs order 12; it held \d+ messages?",
        r"dead letter 1 in courier, rejected: no route leads to Atlantis",
        r"the way to Atlantis is found, and dead letter 1 replayed",
        r"all is handled; worker \d+ stopped \(SIGTERM\), its exit code is 0",
    ):
        assert any(re.fullmatch(told, line) for line in story), told
    assert not [sign for sign in ran.stdout if not sign.isprintable() and sign != "\n"]
    assert CANARY not in ran.said


def test_the_kill_hits_work_in_progress(played: tuple[Command, Ran, float]) -> None:
    command, ran, _ = played
    held = re.search(r"it held (\d+) message", ran.stdout)
    assert held is not None and int(held[1]) >= 1
    with sqlite3.connect(command.folder / "outbox-demo.db") as file:
        [[starts, attempts]] = file.execute(
            "SELECT starts, attempts FROM outbox_table WHERE key = 'order-12' AND destination = 'warehouse'"
        ).fetchall()
        [[effects]] = file.execute("SELECT count(*) FROM effects WHERE order_id = 12 AND listener = 'warehouse'")
    file.close()
    assert (starts, attempts, effects) == (2, 1, 1)


def test_the_commands_that_the_demo_names_work(played: tuple[Command, Ran, float]) -> None:
    command, ran, _ = played
    lines = [line.strip() for line in ran.stdout.split("Look at what is left:")[1].splitlines() if line]
    assert lines[0].startswith("export OUTBOX_DB_ENGINE_URL=sqlite:///")
    said = []
    for line in lines[1:]:
        shell = subprocess.run(
            ["sh", "-c", f"{lines[0]}; {line}"],
            cwd=command.folder,
            capture_output=True,
            text=True,
            timeout=SOON,
            check=True,
        )
        said.append(shell.stdout)
    status, courier, failed, cut = said
    assert re.search(r"handled +153, kept", status)
    assert courier.count("order.paid   courier") == 5
    assert "attempt 2" in failed and "the bank does not answer" in failed
    assert "1 attempt never ended" in cut


def test_the_file_holds_only_what_the_demo_says(played: tuple[Command, Ran, float]) -> None:
    command, _, _ = played
    assert [file.name for file in command.folder.iterdir()] == ["outbox-demo.db"]


@pytest.mark.parametrize(
    ("what", "tampering"),
    [
        ("orders committed", "DELETE FROM orders WHERE id = (SELECT max(id) FROM orders)"),
        ("traces of rolled back orders", "INSERT INTO effects VALUES ('billing', {rolled_back})"),
        ("traces of rolled back orders", "UPDATE outbox_table SET key = 'order-{rolled_back}' WHERE id = 1"),
        ("billing: messages handled", "DELETE FROM outbox_table WHERE destination = 'billing' AND id = 1"),
        ("billing: orders with exactly one effect", "INSERT INTO effects VALUES ('billing', 12)"),
        ("courier: orders with exactly one effect", "DELETE FROM effects WHERE listener = 'courier' AND order_id = 12"),
        ("effects altogether", "INSERT INTO effects VALUES ('billing', 12)"),
        ("failed twice, then succeeded", "UPDATE outbox_table SET attempts = 2 WHERE attempts = 3"),
        ("messages left", "UPDATE outbox_table SET done_at = NULL WHERE id = 1"),
    ],
)
def test_the_ledger_finds_whatever_is_lost_doubled_or_invented(
    played: tuple[Command, Ran, float], tmp_path: Path, what: str, tampering: str
) -> None:
    command, _, _ = played
    copy = tmp_path / "copy.db"
    copy.write_bytes((command.folder / "outbox-demo.db").read_bytes())
    plan = _plan_of(7)
    with sqlite3.connect(copy) as file:
        runs = file.execute("SELECT sum(attempts) FROM outbox_table").fetchone()[0] + 2
    assert [entry for entry in balance(copy, replace(plan, runs=runs)) if not entry.balances] == []
    with file:
        file.execute(tampering.format(rolled_back=min(plan.rolled_back)))
    file.close()
    wrong = [entry.what for entry in balance(copy, replace(plan, runs=runs)) if not entry.balances]
    assert what in wrong


def test_the_ledger_asks_for_a_run_that_the_kill_undid(played: tuple[Command, Ran, float]) -> None:
    command, _, _ = played
    entries = balance(command.folder / "outbox-demo.db", replace(_plan_of(7), runs=0))
    assert [entry.what for entry in entries if not entry.balances] == ["listener runs undone by SIGKILL"]


def _plan_of(seed: int) -> Plan:
    orders = invent_orders(seed)
    return Plan(
        placed=frozenset(order.id for order in orders if order.card != "declined"),
        rolled_back=frozenset(order.id for order in orders if order.card == "declined"),
        slow=frozenset(order.id for order in orders if order.card == "slow"),
        runs=0,
        replayed=1,
    )


def test_the_same_seed_plays_the_same_orders() -> None:
    assert invent_orders(7) == invent_orders(7) != invent_orders(8)


def test_an_entry_balances_only_with_what_was_expected() -> None:
    assert Entry("orders", 3, 3).balances and not Entry("orders", 3, 4).balances
    assert Entry("runs", 1, 4, at_least=True).balances and not Entry("runs", 1, 0, at_least=True).balances


async def test_a_demo_whose_ledger_does_not_balance_ends_with_1(tmp_path: Path) -> None:
    file = tmp_path / "played.db"
    with Command(tmp_path).started("demo", "--file", str(file), "--json") as demo:
        await until(lambda: _effects(file) > 0)
        with sqlite3.connect(file, timeout=30) as connection:
            connection.execute("INSERT INTO effects VALUES ('billing', 12)")
        connection.close()
        stdout, story = await asyncio.to_thread(demo.communicate, timeout=SOON)
    ran = Ran(demo.returncode, stdout, story)
    assert ran.code == ExitCode.WRONG
    assert ran.document["balanced"] is False
    assert [entry["what"] for entry in ran.document["ledger"] if not entry["balances"]] == [
        "billing: orders with exactly one effect",
        "effects altogether",
    ]
    assert "error: the ledger does not balance" in story and " WRONG" in story


def _effects(file: Path) -> int:
    if not file.exists():
        return 0
    connection = sqlite3.connect(file)
    try:
        return int(connection.execute("SELECT count(*) FROM effects").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_demo_that_is_interrupted_leaves_no_worker_behind(tmp_path: Path, number: signal.Signals) -> None:
    with Command(tmp_path).started("demo") as demo:
        while not (found := re.search(r"worker (\d+) starts", await asyncio.to_thread(line_of, demo))):
            assert demo.poll() is None
        worker = int(found[1])
        assert _lives(worker)
        demo.send_signal(number)
        await asyncio.to_thread(demo.communicate, timeout=SOON)
        assert demo.returncode != 0
    await until(lambda: not _lives(worker))


def _lives(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_file_that_is_not_from_a_demo_is_never_touched(tmp_path: Path) -> None:
    theirs = tmp_path / "outbox-demo.db"
    with sqlite3.connect(theirs) as connection:
        connection.execute("CREATE TABLE precious (id INTEGER)")
    connection.close()
    text = tmp_path / "notes.txt"
    text.write_text("precious")
    before = theirs.read_bytes()
    for file in (theirs, text, tmp_path):
        ran = Command(tmp_path).run_now("demo", "--file", str(file))
        assert (ran.code, ran.stdout) == (ExitCode.USAGE, "")
        assert "is not from a demo" in ran.stderr
    assert (theirs.read_bytes(), text.read_text()) == (before, "precious")
    assert Command(tmp_path).run_now("demo", "--file", str(tmp_path / "nowhere/x.db")).code == ExitCode.UNREACHABLE


def test_on_a_terminal_the_demo_shows_bars_and_replaces_the_file_of_the_last_one(
    played: tuple[Command, Ran, float], tmp_path: Path
) -> None:
    before, _, _ = played
    (tmp_path / "outbox-demo.db").write_bytes((before.folder / "outbox-demo.db").read_bytes())
    ran = Command(tmp_path).on_a_terminal("demo")
    assert ran.code == 0
    assert "━" in ran.stdout and "warehouse" in ran.stdout
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ran.stdout)
    assert "The ledger balances" in shown
    lines = shown.split("The ledger balances")[0].replace("\r", "\n").splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert f"{sys.executable} -m outbox status" in shown
