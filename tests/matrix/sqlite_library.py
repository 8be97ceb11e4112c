"""The oldest SQLite that works, built from the sources that a package of another language carries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from outbox.testing.servers import ladder
from tests.matrix.namespaces import CannotEnter

# No Python package has sources of SQLite as old as this; npm's better-sqlite3 has, by their own versions.
_PACKAGES = {"3.34.0": "better-sqlite3@7.1.2", "3.35.2": "better-sqlite3@7.1.4"}
# As distributions build it: Python's module asks for some of these, and the store for JSON.
_OPTIONS = ("ENABLE_JSON1", "ENABLE_DESERIALIZE", "ENABLE_FTS5", "ENABLE_COLUMN_METADATA", "THREADSAFE=1")


def library_of(version: str) -> Path:
    """The folder of a libsqlite3.so.0 of this version, built the first time it is asked for."""
    folder = ladder.kept(f"sqlite-{version}", partial(_build, version))
    asked = [sys.executable, "-c", "import sqlite3; print(sqlite3.sqlite_version)"]
    variables = {"LD_LIBRARY_PATH": str(folder)}
    found = subprocess.run(asked, env=variables, capture_output=True, text=True, check=False)
    if found.stdout.strip() != version:
        said = found.stdout.strip() or found.stderr.strip()[-200:]
        raise CannotEnter(f"this Python takes no other SQLite than its own: {said} instead of {version}")
    return folder


def _build(version: str, folder: Path) -> None:
    missing = [program for program in ("npm", "cc") if shutil.which(program) is None]
    if missing:
        raise CannotEnter(f"SQLite {version} has to be built: {' and '.join(missing)} is not on this machine")
    with tempfile.TemporaryDirectory() as temporary:
        sources = _sources(version, Path(temporary))
        defined = [f"-DSQLITE_{option}" for option in _OPTIONS]
        output = ["-o", str(folder / "libsqlite3.so.0"), "-Wl,-soname,libsqlite3.so.0"]
        compile_it = ["cc", "-O1", "-shared", "-fPIC", *defined, str(sources), *output, "-lm", "-ldl", "-lpthread"]
        if subprocess.run(compile_it, check=False).returncode:
            raise CannotEnter(f"SQLite {version} could not be built; the compiler's text is above")


def _sources(version: str, folder: Path) -> Path:
    """sqlite3.c of the package: an archive inside an archive."""
    pack = ["npm", "pack", "--silent", _PACKAGES[version]]
    if subprocess.run(pack, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode:
        raise CannotEnter(f"npm could not fetch {_PACKAGES[version]}; its own text is above")
    for pattern in ("*.tgz", "package/deps/sqlite3.tar.gz"):
        for archive in list(folder.glob(pattern)):
            shutil.unpack_archive(archive, folder, "gztar")
    return next(folder.rglob("sqlite3.c"))
