"""An older SQLite than the statements need is refused before anything is done with it."""

from __future__ import annotations

import sqlite3

import pytest

from outbox import Outbox
from outbox.core.errors import ConfigurationError
from outbox.stores.sqlite.engines import OLDEST, check_version


def test_an_older_library_is_refused_at_the_start_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"SQLite 3\.34\.1 is too old, and 3\.35\.2 or newer.*newer system"):
        Outbox(db_engine_url="sqlite://").store  # noqa: B018


async def test_a_worker_does_not_start_on_an_older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 35, 1))
    outbox = Outbox(db_engine_url="sqlite://")
    with pytest.raises(ConfigurationError, match=r"SQLite 3\.35\.1 is too old"):
        async with outbox.running(relay=True):
            pytest.fail("it started")
    await outbox.close()


def test_the_oldest_that_was_tested_and_every_newer_one_are_taken() -> None:
    for version in (OLDEST, (3, 35, 5), (3, 40, 1), (4, 0, 0)):
        check_version(version)
