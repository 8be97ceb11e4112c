"""Running: one version, from its programs to its result."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.matrix import namespaces
from tests.matrix.environments import ROOT, SOURCES, prepare_machine, prepare_tree
from tests.matrix.namespaces import CannotEnter, inside
from tests.matrix.results import Result, counted
from tests.matrix.sqlite_library import library_of
from tests.matrix.trees import tree_of
from tests.matrix.versions import Version
from tests.support.mariadb import ON_MYSQL

_REPORT = "report-of-the-matrix.xml"
_NOTHING_RUN = 5  # pytest's exit code where no test was left
_RAN = (0, 1)  # all passed, or some failed

# Run by the environment under test, so that the table names what its tests meet.
_TELL = """
import platform, re, sqlite3, subprocess, sys
from importlib.metadata import version
from outbox.testing.servers import MariaDB, MySQL, PostgreSQL, RabbitMQ, ServerMissing
from outbox.testing.servers.ladder import find
def of(name, server, program):
    try:
        folder = find(name, server.LADDER, "").folder
    except ServerMissing:
        return
    said = subprocess.run([folder / program, "--version"], capture_output=True, text=True).stdout if program else folder
    print(name, re.findall(r"(?:Ver |\\) |rabbitmq_server-)([0-9.]+)", str(said))[0], file=file)
with open(sys.argv[1], "w") as file:
    print("Python", platform.python_version(), file=file)
    of("PostgreSQL", PostgreSQL, "postgres")
    of("MariaDB", MariaDB, "mariadbd")
    of("MySQL", MySQL, "mysqld")
    of("RabbitMQ", RabbitMQ, "")
    print("SQLite", sqlite3.sqlite_version, file=file)
    for name in ("SQLAlchemy", "pydantic", "typer", "rich", "aiosqlite", "asyncpg", "psycopg", "asyncmy", "aio-pika",
                 "aiohttp"):
        print(name, version(name), file=file)
"""
# What the table names of them, the one in question first.
_NAMED = {
    "postgresql": ("PostgreSQL", "Python", "SQLAlchemy"),
    "mysql": ("MariaDB", "MySQL", "Python", "SQLAlchemy", "asyncmy"),
    "rabbitmq": ("RabbitMQ", "Python"),
    "sqlite": ("SQLite", "Python", "SQLAlchemy"),
    "all": ("Python", "PostgreSQL", "MariaDB", "RabbitMQ", "SQLite", "SQLAlchemy"),
}


@dataclass(frozen=True)
class Place:
    """Where the tests of a version run: a tree, or this machine."""

    python: str
    tree: Path | None = None
    variables: Mapping[str, str] | None = None

    def run(self, arguments: Sequence[str]) -> int:
        command = [self.python, *arguments]
        if self.tree is not None:
            allowed = {"OUTBOX_TEST_DOWNLOADS": "0"}  # the tree has what belongs to its version
            return inside(self.tree, command, folder=f"/{SOURCES}", variables={**allowed, **(self.variables or {})})
        surroundings = {"OUTBOX_TEST_DOWNLOADS": "1", **os.environ, **(self.variables or {})}
        return subprocess.run(command, cwd=ROOT, env=surroundings, check=False).returncode

    @property
    def folder(self) -> Path:
        return self.tree / SOURCES if self.tree else ROOT


def run(version: Version, tests: Sequence[str], workers: int) -> Result:
    """Bring the version up, run its tests, and say how they ended."""
    with _place(version) as place:
        return _run(place, version, tests, workers)


def _run(place: Place, version: Version, tests: Sequence[str], workers: int) -> Result:
    found = _found(place, version)
    report = place.folder / _REPORT
    report.unlink(missing_ok=True)
    begun = time.monotonic()
    options = ["-q", "--tb=line", "-p", "tests.matrix.selection", "--belongs", version.belongs, f"--junitxml={_REPORT}"]
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    code = place.run(["-m", "pytest", *options, *spread, *tests])
    if code not in _RAN:
        said = "no test belongs to it" if code == _NOTHING_RUN else f"pytest ended with code {code}"
        raise CannotEnter(f"its tests did not run to their end: {said}")
    passed, failed, skipped, failures = counted(report)
    report.unlink()
    return Result(
        version.name,
        found,
        tuple(tests),
        version.belongs,
        passed,
        failed,
        skipped,
        round(time.monotonic() - begun),
        datetime.now(UTC).date().isoformat(),
        failures,
    )


@contextmanager
def _place(version: Version) -> Iterator[Place]:
    if version.tree is not None:
        namespaces.check()
        tree = tree_of(version.tree)
        with _alone_in(tree):
            yield Place(prepare_tree(tree, version.python), tree, {ON_MYSQL: "1"} if version.on_mysql else {})
        return
    variables = {"LD_LIBRARY_PATH": str(library_of(version.sqlite))} if version.sqlite else {}
    yield Place(prepare_machine(version.dependencies), None, variables)


@contextmanager
def _alone_in(tree: Path) -> Iterator[None]:
    """One run at a time in a tree; what its servers left behind when they were killed goes with it."""
    with (tree / "srv/lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotEnter(f"another run is in {tree.name}") from None
        try:
            yield
        finally:
            for left in (tree / "tmp").iterdir():  # nothing is mounted there: a run's mounts are its own
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _found(place: Place, version: Version) -> tuple[str, ...]:
    """The exact versions of what takes part, the one in question first."""
    file = place.folder / "versions-of-the-matrix.txt"
    if place.run(["-c", _TELL, file.name]):
        raise CannotEnter("its environment does not start; the text is above")
    lines = file.read_text().splitlines()
    file.unlink()
    if version.dependencies != "locked":
        return (version.says, *lines)
    return tuple(line for name in _NAMED[version.belongs] for line in lines if line.split()[0] == name)
