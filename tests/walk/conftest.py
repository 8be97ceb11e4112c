"""The `outbox` command and a small service on the databases at hand, and a listener that shows what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outbox import Listener, Message, Outbox
from tests.support.commands import APPLICATION, Command

from .shops import Shop
from .strategies import Effects, Watch

Arrivals = asyncio.Queue[tuple[Any, Message]]


@pytest.fixture
def command(database_url: str, table_name: str, tmp_path: Path) -> Command:
    """The command, on the database at hand."""
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": database_url, "OUTBOX_TABLE_NAME": table_name})


@pytest.fixture
def sqlite_command(tmp_path: Path) -> Command:
    """The command on a SQLite file, for what does not depend on the database."""
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": f"sqlite:///{tmp_path / 'outbox.db'}"})


@pytest.fixture
def application(command: Command) -> Command:
    """The command in a folder with a module of listeners."""
    (command.folder / "application.py").write_text(APPLICATION)
    return command


@pytest.fixture
def sqlite_application(sqlite_command: Command) -> Command:
    """The same on a SQLite file."""
    (sqlite_command.folder / "application.py").write_text(APPLICATION)
    return sqlite_command


@pytest.fixture
async def sqlite_outbox(sqlite_command: Command) -> AsyncIterator[Outbox]:
    """The outbox of that file."""
    outbox = Outbox(db_engine_url=sqlite_command.settings["OUTBOX_DB_ENGINE_URL"], poll_interval=0.2)
    yield outbox
    await outbox.close()


@pytest.fixture
def arrivals() -> Arrivals:
    """Bodies and messages of orders, as `listener` gets them."""
    return asyncio.Queue()


@pytest.fixture
def listener(arrivals: Arrivals) -> Listener:
    """Takes orders."""

    async def on_order(body: Any, message: Message) -> None:
        arrivals.put_nowait((body, message))

    return Listener("order.*", on_order, queue="orders")


@pytest.fixture
async def shop(tmp_path: Path, outbox: Outbox, database_url: str, table_name: str) -> AsyncIterator[Shop]:
    """Processes on the database at hand, which end with the test."""
    shop = Shop(tmp_path, database_url, table_name)
    try:
        await shop.make_tables(outbox)
        yield shop
    finally:
        shop.kill()


@pytest.fixture
def watch() -> Watch:
    """What observers were told."""
    return Watch()


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Effects:
    """A table that listeners write to."""
    effects = Effects(outbox, table_name)
    await effects.create()
    return effects
