"""Plugin: fixtures for pytest, found by its entry point. Nothing is started or opened before a test asks for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outbox.instance import Outbox

# Tests that inherit a contract show what its assertions compared.
pytest.register_assert_rewrite(
    "outbox.testing.store", "outbox.testing.store_contract", "outbox.testing.transport_contract"
)


@pytest.fixture(scope="session")
def outbox_postgresql_url() -> Iterator[str]:
    """A PostgreSQL for the whole run, private unless OUTBOX_TEST_POSTGRESQL_URL names one; the URL names no driver."""
    from outbox.testing.servers import postgresql  # a thousand lines that only a test with a server needs

    with postgresql() as server:
        yield server.url


@pytest.fixture
def outbox_sqlite_url(tmp_path: Path) -> str:
    """A SQLite file of this test's own."""
    return f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"


@pytest.fixture
def outbox_on_sqlite(outbox_sqlite_url: str) -> Iterator[Outbox]:
    """An Outbox on a SQLite file of this test's own, closed afterwards."""
    outbox = Outbox(db_engine_url=outbox_sqlite_url)
    yield outbox
    _run(outbox.close)


@pytest.fixture
def outbox_on_postgresql(outbox_postgresql_url: str) -> Iterator[Outbox]:
    """An Outbox on `outbox_postgresql_url` without rows; the processes of pytest-xdist have tables of their own."""
    from outbox.testing.clearing import clear

    name = f"outbox_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    outbox = Outbox(db_engine_url=outbox_postgresql_url, table_name=name, sync_wakeups=False)
    _run(lambda: clear(outbox))
    yield outbox
    _run(outbox.close)


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with ThreadPoolExecutor(1) as thread:  # where no event loop can be running already
        thread.submit(lambda: asyncio.run(work())).result()
