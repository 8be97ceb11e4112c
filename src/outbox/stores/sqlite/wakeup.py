"""SqliteWakeup: wakes this process when another one has committed, by looking at the file's version."""

from __future__ import annotations

import asyncio

from outbox.stores.sqlite.runner import SqliteRunner
from outbox.stores.wakeup import Wakeup

QUICK_LOOK, SLOW_LOOK = 0.005, 0.05  # seconds between two looks at the file's version, after activity and when idle


class SqliteWakeup(Wakeup):
    """A task for each event loop in which somebody waits."""

    def __init__(self, runner: SqliteRunner) -> None:
        super().__init__()
        self._runner = runner

    async def listen(self, longest: float) -> None:
        in_loop = self._runner.loops.here()
        if in_loop.pulse is None or in_loop.pulse.done():
            in_loop.pulse = asyncio.create_task(self._watch(), name="outbox watch")

    async def _watch(self) -> None:
        """Ring every bell when the file changes, as every commit of anybody changes its version."""
        thread, pause = self._runner.own(), QUICK_LOOK
        seen = thread.version()
        while True:
            await asyncio.sleep(pause)
            version = thread.version()
            pause = QUICK_LOOK if version != seen else min(pause * 1.2, SLOW_LOOK)
            if version != seen:
                self.ring_all()
            seen = version
