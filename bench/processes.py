"""Processes: programs that are spoken to by lines, and the processor time they take."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from outbox.testing.servers.private_server import descendants

ROOT = Path(__file__).resolve().parents[1]

PATIENCE = 120.0  # seconds that an answer may take before something must be wrong
_LONGEST_LINE = 2**20


class Program:
    """A process and its lines."""

    def __init__(
        self, process: asyncio.subprocess.Process, told: asyncio.StreamWriter, says: asyncio.StreamReader
    ) -> None:
        self._process = process
        self._told = told
        self._says = says

    def say(self, text: str) -> None:
        self._told.write(f"{text}\n".encode())

    async def heard(self) -> str:
        """The next line that it says."""
        async with asyncio.timeout(PATIENCE):
            line = await self._says.readline()
        if not line:
            raise RuntimeError(f"a program ended with code {await self._process.wait()}; its words are above")
        return line.decode().strip()

    def ignore(self) -> None:
        """Read what it says from now on, so that it can go on speaking, and forget it."""
        self._ignoring = asyncio.create_task(self._forget())

    async def _forget(self) -> None:
        while await self._says.readline():
            pass

    async def asked(self, text: str) -> str:
        self.say(text)
        return await self.heard()

    @property
    def processor_time(self) -> float:
        """Seconds of processor time, user and system, of all its threads."""
        # The clock that clock_getcpuclockid(3) names, which Python does not offer for other processes.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    @property
    def memory(self) -> int:
        """Bytes that it holds in memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(20):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def time_of_all(process_id: int) -> float:
    """Seconds of processor time of a process, of its children, and of those that have ended."""
    ticks = 0
    for each in (process_id, *descendants(process_id)):
        with suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, _status(each)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def parent_of(process_id: int) -> int:
    return int(_status(process_id)[1])


def _status(process_id: int) -> list[str]:
    """What follows the name in /proc: the state, the parent, …"""
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()


async def ran(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program to its end."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, **environment}, stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}; its text is above")


@asynccontextmanager
async def program(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[Program]:
    """A program that ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    running = Program(process, process.stdin, process.stdout)
    try:
        yield running
    finally:
        await running.stop()
