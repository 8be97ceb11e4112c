"""Every block of code in README and docs does what its page says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from outbox.testing.servers import PgBouncer
from tests.support.mariadb import url_through

from .pages import all_pages
from .run_page import BROKER, MARIADB, PLACEHOLDER, POOLED

RUN = ("python", "console", "text")  # a text block shows what the Python block before it prints
DRAWN = ("",)  # pictures, in no language
# What a page names, and its fixture.
SERVERS = {PLACEHOLDER: "database", POOLED: "pooled", BROKER: "rabbitmq_url", MARIADB: "on_mariadb"}
MOST_EXEMPTIONS = 3
WITHIN = 280.0  # seconds for a page

PAGES = {page.name: page for page in all_pages() if page.blocks}


@pytest.fixture
def database(postgresql_url: str) -> Iterator[str]:
    """A database of one page's own, since pages make tables as they please."""
    name = f"docs_{os.getpid()}"
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield urlunsplit(urlsplit(postgresql_url)._replace(scheme="postgresql+asyncpg", path=f"/{name}"))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def pooled(database: str) -> Iterator[str]:
    """The same behind a pooler."""
    with PgBouncer(database) as pooler:
        yield pooler.url.replace("postgresql", "postgresql+asyncpg", 1)


@pytest.fixture
def on_mariadb(mariadb_database: str) -> str:
    """The same on MariaDB."""
    return url_through(mariadb_database, "asyncmy")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_the_page_shows(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    servers = {shown: fixture for shown, fixture in SERVERS.items() if shown in PAGES[name].text}
    replacements = [f"{shown}={request.getfixturevalue(fixture)}" for shown, fixture in servers.items()]
    run(PAGES[name].path, tmp_path, *replacements)


def test_the_example_of_the_readme_runs_on_postgresql_with_nothing_but_another_url(
    database: str, tmp_path: Path
) -> None:
    text = PAGES["README.md"].text
    sqlite = "sqlite+aiosqlite:///orders.db"
    assert text.count(sqlite) == 1
    page = tmp_path / "README.md"
    page.write_text(text.replace(sqlite, database))
    run(page, tmp_path)


def test_every_block_is_of_a_kind_that_is_run_or_is_exempted_for_a_reason() -> None:
    astray = [
        f"{page.name}:{block.line}: {block.language!r}"
        for page in PAGES.values()
        for block in page.blocks
        if block.exempted_because is None and block.language not in (*RUN, *DRAWN)
    ]
    assert not astray


def test_exemptions_are_few() -> None:
    exempted = [
        f"{page.name}:{block.line}: {block.exempted_because}"
        for page in PAGES.values()
        for block in page.blocks
        if block.exempted_because is not None
    ]
    assert len(exempted) <= MOST_EXEMPTIONS, exempted


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_a_page_shows_is_used_by_a_command_or_block_behind_it(name: str) -> None:
    blocks = PAGES[name].blocks
    for position, block in enumerate(blocks):
        if block.file_name is not None:
            behind = "".join(later.text for later in blocks[position + 1 :])
            assert block.file_name.removesuffix(".py") in behind, f"nothing runs {block.file_name}"


def run(page: Path, folder: Path, *replacements: str) -> None:
    """Run a page's blocks in a process of its own."""
    # Warnings are errors, but a short script may end without closing its engines.
    python = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning"]
    process = subprocess.Popen(
        [*python, "-m", f"{__package__}.run_page", str(page), *replacements],
        cwd=folder,
        env={**_surroundings(), "PYTHONPATH": str(_package_root()), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=WITHIN)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # with whatever the page has started
        process.communicate()
        raise
    assert process.returncode == 0, output


def _surroundings() -> dict[str, str]:
    kept = {"OUTBOX_TEST_DOWNLOADS"}
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_") or name in kept}


def _package_root() -> Path:
    """The folder from which this package can be imported."""
    assert __package__ is not None
    return Path(__file__).parents[__package__.count(".") + 1]
