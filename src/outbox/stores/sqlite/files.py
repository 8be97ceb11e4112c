"""Files: which SQLite files connections have open, what a forked child may not use, and what was replaced meanwhile.

SQLite remembers by itself which locks its process has on a file, and a child of `os.fork` inherits that memory without
the locks. A connection that the child opens believes it: it waits for ever for a lock that was a parent's thread's, or
writes to a log that another process has deleted because it saw no lock, and what it committed is gone.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import URL, Connection, Engine, event

from outbox.core.errors import DatabaseReplaced, ForkRefused
from outbox.core.forks import forget_after_fork


class _Files:
    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # how many connections each file has
        self._inherited: set[str] = set()

    def watch(self, engine: Engine) -> None:
        """Count an engine's connections, and let it open none that would be unsafe."""
        url, file = engine.url, os.path.realpath(engine.url.database or "")
        event.listen(engine, "do_connect", lambda *_: self.check(file))
        event.listen(engine, "do_connect", lambda *_: make_private(url))
        event.listen(engine, "connect", lambda *_: self._open.update({file: 1}))
        event.listen(engine, "close", lambda *_: self._open.subtract({file: 1}))

    def check(self, file: str) -> None:
        if file in self._inherited:
            raise ForkRefused(
                f"the parent of this process had {file} open when it forked, and SQLite's locks do not survive that: "
                "transactions would be lost. Fork before the outbox is used, let the parent `await outbox.close()` "
                'first, or start processes by "spawn"'
            )

    def forked(self) -> None:
        self._inherited.update(file for file, count in self._open.items() if count > 0)


files = _Files()
forget_after_fork(files)


def make_private(url: URL) -> None:
    """Make the file that a connection would make, for this user alone: messages are in it. One that is there stays.

    SQLite gives the files beside it the same mode.
    """
    name = url.database or ""
    if name.startswith("file:"):
        made_by_connecting = url.query.get("mode", "rwc") == "rwc" and not name.startswith("file://")
        name = unquote(name.removeprefix("file:")) if made_by_connecting else ""
    if name:
        with suppress(OSError):  # it exists, or SQLite says better what is wrong
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


_FILE = "outbox file"  # in what SQLAlchemy keeps about a connection: the path, and which file was there


def notice_replacement(engine: Engine) -> None:
    """Let no transaction begin or commit in a file that is not the one at its path any more, as after a restore.

    The connection is kept: a new one would find a log that is not its file's, or make a file where one is being put.
    """
    path = Path(engine.url.database or "").absolute()

    def opened(connection: object, record: Any) -> None:
        record.info[_FILE] = path, _identity(path)

    def check(connection: Connection) -> None:
        _check(*connection.info.get(_FILE, (path, None)))

    event.listen(engine, "connect", opened)
    event.listen(engine, "begin", check)
    event.listen(engine, "commit", check)


def _check(path: Path, known: tuple[int, int] | None) -> None:
    found = _identity(path)
    if known is not None and found != known:
        raise DatabaseReplaced(
            f"{path} is {'gone' if found is None else 'another file now'}: what is written to the one that was opened "
            "is lost. Start this process again. Before a database is restored, stop all processes and remove "
            "the files beside it that end in -wal and -shm"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
