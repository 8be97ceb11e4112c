"""Files: which SQLite files connections of our own have open, so that a forked child keeps away from them.

SQLite remembers by itself which locks its process has on a file, and a child of `os.fork` inherits that memory without
the locks. A connection that the child opens believes it: it waits for ever for a lock that was a parent's thread's, or
writes to a log that another process has deleted because it saw no lock, and what it committed is gone.
"""

from __future__ import annotations

import os
from collections import Counter

from sqlalchemy import Engine, event

from outbox.core.errors import ForkRefused
from outbox.core.forks import forget_after_fork


class _Files:
    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # how many connections each file has
        self._inherited: set[str] = set()

    def watch(self, engine: Engine) -> None:
        """Count an engine's connections, and let it open none that would be unsafe."""
        file = os.path.realpath(engine.url.database or "")
        event.listen(engine, "do_connect", lambda *_: self.check(file))
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
