"""Running: one version, from its programs to its result."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
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

_REPORT = "report-of-the-matrix.xml"
_NOTHING_RUN = 5  # pytest's exit code where no test was left
_RAN = (0, 1)  # all passed, or some failed

# Printed by the environment under test, so that the table names what was really there.
_TELL = """
import platform, sqlite3, subprocess, glob
from importlib.metadata import version
print("Python", platform.python_version())
print("SQLite", sqlite3.sqlite_version)
for program in sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=len):
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    print("PostgreSQL", said.split()[2])
for folder in glob.glob("/usr/lib/rabbitmq/lib/rabbitmq_server-*"):
    print("RabbitMQ", folder.rpartition("-")[2])
for name in ("SQLAlchemy", "pydantic", "typer", "aiosqlite", "asyncpg", "psycopg", "aio-pika", "aiohttp"):
    print(name, version(name))
"""
_SERVERS = {"postgresql": "PostgreSQL", "rabbitmq": "RabbitMQ", "sqlite": "SQLite", "all": "Python"}


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
            return inside(self.tree, command, folder=f"/{SOURCES}", variables=allowed)
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **(self.variables or {})}, check=False).returncode

    @property
    def folder(self) -> Path:
        return self.tree / SOURCES if self.tree else ROOT


def run(version: Version, tests: Sequence[str], workers: int) -> Result:
    """Bring the version up, run its tests, and say how they ended."""
    place = _place(version)
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


def _place(version: Version) -> Place:
    if version.tree is not None:
        namespaces.check()
        tree = tree_of(version.tree)
        return Place(prepare_tree(tree, version.python), tree)
    variables = {"LD_LIBRARY_PATH": str(library_of(version.sqlite))} if version.sqlite else {}
    return Place(prepare_machine(version.dependencies), None, variables)


def _found(place: Place, version: Version) -> tuple[str, ...]:
    """The exact versions of what takes part, the one in question first."""
    listed = "versions-of-the-matrix.txt"
    file = place.folder / listed
    # A file and not a pipe: what runs in a tree keeps the terminal.
    if place.run(
        ["-c", f"import contextlib\nwith open({listed!r}, 'w') as f, contextlib.redirect_stdout(f):\n exec({_TELL!r})"]
    ):
        raise CannotEnter("its environment does not start; the text is above")
    lines = file.read_text().splitlines()
    file.unlink()
    first = _SERVERS[version.belongs]
    if version.dependencies != "locked":
        servers = [line for line in lines if line.split()[0] in _SERVERS.values()]
        return (version.says, *(line for line in lines if line not in servers), *servers)
    wanted = [line for line in lines if line.split()[0] in _SERVERS.values() or line.startswith("SQLAlchemy")]
    return (
        *(line for line in wanted if line.startswith(first)),
        *(line for line in wanted if not line.startswith(first)),
    )
