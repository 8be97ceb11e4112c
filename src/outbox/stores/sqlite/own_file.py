"""OwnFile: the file in which an outbox has its tables, and whether a caller's connection leads there."""

from __future__ import annotations

import os
from weakref import WeakSet

from sqlalchemy import URL, Engine
from sqlalchemy.pool import Pool

from outbox.core.errors import WrongDatabase


class OwnFile:
    """Compares the paths that engines were made with: asking a connection would cost its caller a statement."""

    def __init__(self, url: URL | None) -> None:
        self._path = _path(url)
        self._known: WeakSet[Pool] = WeakSet()

    def check(self, engine: Engine) -> None:
        """Refuse an engine that leads to another file. What is no plain path may lead anywhere."""
        if self._path is None or engine.pool in self._known:
            return
        path = _path(engine.url)
        if path is not None and path != self._path:
            raise WrongDatabase(
                f"this session leads to the file {path!r}, and the tables of this outbox are in {self._path!r}: use a "
                "session on the database of the outbox, or an Outbox for each database"
            )
        self._known.add(engine.pool)


def _path(url: URL | None) -> str | None:
    name = None if url is None else url.database
    return None if not name or name.startswith((":memory:", "file:")) else os.path.realpath(name)
