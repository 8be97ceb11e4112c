"""The SQLite that this Python has: a library of the machine, which may be older than what the statements need."""

from __future__ import annotations

import sqlite3

from outbox.core.errors import ConfigurationError

# UPDATE … RETURNING came with 3.35.0; this is the oldest version that the tests have been run on.
OLDEST = (3, 35, 2)


def check_version(found: tuple[int, ...] | None = None) -> None:
    """Refuse an older library at the start, where the first claim would fail at a word that it does not know."""
    found = found or sqlite3.sqlite_version_info
    if found < OLDEST:
        raise ConfigurationError(
            f"SQLite {_text(found)} is too old, and {_text(OLDEST)} or newer is needed: Python uses the library of its "
            "machine (sqlite3.sqlite_version), so take a newer system or image, or a Python that brings its own"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
