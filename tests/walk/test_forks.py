"""Forks: a child uses nothing that is its parent's, and the parent does not notice the child."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WITHIN = 90.0  # seconds that no program takes


def forked(case: str, url: str, table_name: str) -> Any:
    """What the program says: it forks, this process does not."""
    command = [sys.executable, "-m", "tests.walk.forking", case, url, table_name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)  # without a loop: psycopg
def test_transactions_of_parent_and_children_are_not_mixed_up(database_url: str, table_name: str) -> None:
    found = forked("many", database_url, table_name)
    assert len(found["told"]) == 4 * 2 * 10
    assert found["orders"] == found["told"]
    assert found["messages"] == found["told"]


@pytest.mark.parametrize("database_url", ["postgresql+psycopg"], indirect=True)
def test_a_child_cannot_end_the_parents_transaction(database_url: str, table_name: str) -> None:
    found = forked("inside", database_url, table_name)
    assert found["orders"] == found["messages"] == ["inside"]


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)  # without a loop: psycopg
def test_children_that_are_forked_while_threads_emit_emit_too(database_url: str, table_name: str) -> None:
    found = forked("threads", database_url, table_name)
    assert found["codes"] == [0] * 9
    assert found["orders"] == found["told"]
    assert found["messages"] == found["told"]


@pytest.mark.parametrize("database_url", ["postgresql+psycopg"], indirect=True)
def test_a_child_waits_for_no_thread_that_its_parent_alone_has(database_url: str, table_name: str) -> None:
    found = forked("midway", database_url, table_name)
    assert found["codes"] == {"make_sync_engine": [0], "connection": [0], "listen": [0]}
    assert found["orders"] == found["messages"] == found["told"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_on_sqlite_a_child_is_refused_while_the_parent_has_the_file_open(database_url: str, table_name: str) -> None:
    found = forked("refused", database_url, table_name)
    assert found["answers"] == ["ForkRefused", "ForkRefused", "ForkRefused"]  # the last one in memory
    assert found["orders"] == found["messages"] == found["told"]
    assert "waiting 2 0" in found["told"]
