"""Program: a Python process of its own, as an operator would start it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from textwrap import dedent

from tests.support.observing import PATIENCE


class Program:
    """A running process. What it prints are the events that a test waits for."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self) -> str:
        """The next line it prints."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        return line.decode().rstrip("\n")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    async def end(self) -> tuple[int, str, str]:
        """Its exit code, what else it printed, and what it complained about."""
        out, errors = await asyncio.wait_for(self._process.communicate(), PATIENCE)
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), errors.decode()


@asynccontextmanager
async def program(source: str, *arguments: str, **environment: str) -> AsyncIterator[Program]:
    """Run the source; whatever is left of it at the end of the block is killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        dedent(source),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.communicate()
