"""What a doctor asks SQLite: how its file is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection

from outbox.core.diagnosis import Finding, Level

LARGEST_LOG = 64 * 1024 * 1024  # bytes; a log that is written back in time stays at about 4 MiB
SHORTEST_PATIENCE = 1.0  # seconds that a connection should wait for its turn to write, at least


def server(connection: Connection) -> str:
    return f"SQLite {connection.exec_driver_sql('SELECT sqlite_version()').scalar()}"


def findings(connection: Connection) -> Iterator[Finding]:
    """How the file is written."""
    mode = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    main = connection.exec_driver_sql("PRAGMA database_list").first()
    if mode in ("wal", "memory"):
        yield Finding(Level.OK, "journal mode", mode)
    else:
        advice = (
            "relays, workers and transaction() switch it to wal; if it stays like this, the file or its folder cannot "
            "be written by them"
        )
        yield Finding(Level.WARNING, "journal mode", f"{mode}: a writer blocks all readers", advice)
    if main is not None and main.file:
        yield _log(Path(f"{main.file}-wal"))


def _log(file: Path) -> Finding:
    size = file.stat().st_size if file.exists() else 0
    what = f"{size / 1024 / 1024:.1f} MiB"
    if size <= LARGEST_LOG:
        return Finding(Level.OK, "write-ahead log", what)
    advice = "some connection reads for a long time and keeps it from being written back: end its transaction"
    return Finding(Level.WARNING, "write-ahead log", what, advice)


def patience(milliseconds: int) -> Finding:
    """How long a connection of the application waits for the write lock."""
    what = f"{milliseconds / 1000:g} s"
    if milliseconds >= SHORTEST_PATIENCE * 1000:
        return Finding(Level.OK, "busy timeout", what)
    advice = "transactions fail as soon as two want to write: call outbox.sqlite.prepare(engine)"
    return Finding(Level.WARNING, "busy timeout", what, advice)
