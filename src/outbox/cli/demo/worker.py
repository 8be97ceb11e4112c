"""A worker process: `outbox worker`, as it would run anywhere, and the lines that it prints."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from typing import Self

Run = tuple[str, int]  # a listener, and the order it was run for

_COMMAND = ("-m", "outbox", "worker", "outbox.cli.demo.shop:listeners", "--outbox", "outbox.cli.demo.shop:outbox")


class DemoWorker:
    """A process that can be killed."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.runs: list[Run] = []
        self._last_words: deque[str] = deque(maxlen=10)
        self._hearing = asyncio.gather(self._hear_traces(), self._hear_log())

    @classmethod
    async def start(cls) -> Self:
        return cls(await asyncio.create_subprocess_exec(sys.executable, *_COMMAND, stdout=PIPE, stderr=PIPE))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def last_words(self) -> str:
        return "\n".join(self._last_words)

    async def kill(self) -> None:
        """End it as a power cut would: SIGKILL cannot be caught."""
        self._process.kill()
        await self._end()

    async def stop(self) -> int:
        """Ask it to end (SIGTERM); its exit code."""
        self._process.terminate()
        return await self._end()

    async def _end(self) -> int:
        await self._hearing  # everything it said, to the last word
        return await self._process.wait()

    async def _hear_traces(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        async for line in self._process.stdout:
            listener, order_id = line.decode().split()
            self.runs.append((listener, int(order_id)))

    async def _hear_log(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - it was asked for
        async for line in self._process.stderr:
            self._last_words.append(line.decode(errors="replace").rstrip())
