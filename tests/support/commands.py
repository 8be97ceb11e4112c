"""Running the `outbox` command: inside this process, as a process of its own, and on a terminal; things to look at."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outbox as library
from outbox import Outbox, Reject, listen
from outbox.cli import app

SOON = 120.0  # seconds: processes start slowly on a busy machine


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    @property
    def error_lines(self) -> int:
        """How many errors stderr tells; a traceback is no line."""
        assert "Traceback" not in self.stderr
        return sum(line.startswith("error: ") for line in self.stderr.splitlines())

    @property
    def document(self) -> Any:
        """Stdout, which must be one JSON document and nothing else."""
        return json.loads(self.stdout)


@dataclass
class Command:
    """`outbox …` in a folder, with settings in its environment."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        return others | {"PYTHONWARNINGS": "error"} | self.settings

    async def run(self, *arguments: str, **settings: str) -> Ran:
        """Run it inside this process, where starting another one would add nothing."""
        return await asyncio.to_thread(self.run_now, *arguments, **settings)

    def run_now(self, *arguments: str, **settings: str) -> Ran:
        unset = {name: None for name in os.environ if name.startswith("OUTBOX_")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "outbox", Outbox())  # a new process would have a new one
            result = CliRunner().invoke(app, arguments, env={**unset, **self.settings, **settings})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    def process(self, *arguments: str, **settings: str) -> Ran:
        """Run it as a process, to its end."""
        ran = subprocess.run(
            [sys.executable, "-m", "outbox", *arguments],
            cwd=self.folder,
            env=self.environment | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SOON,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    @contextmanager
    def started(self, *arguments: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
        """Start it as a process; it is killed if it is still there at the end."""
        with subprocess.Popen(
            [sys.executable, "-m", "outbox", *arguments],
            cwd=self.folder,
            env=self.environment | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_heed_interrupts,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def on_a_terminal(self, *arguments: str, answer: str = "", columns: int = 80) -> Ran:
        """Run it where a person would: on a terminal of so many columns. What it says is all stdout."""
        person, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = self.environment | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        with subprocess.Popen(
            [sys.executable, "-m", "outbox", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        ) as process:
            os.close(terminal)
            if answer:
                os.write(person, answer.encode())
            said = _read_to_the_end(person)
            os.close(person)
        return Ran(process.returncode, said, "")


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def until(condition: Callable[[], Any]) -> Any:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + SOON
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


# A module of listeners that end in time, late, or never.
APPLICATION = """
import asyncio
import threading
import time

from outbox import Outbox, listen


@listen("short", queue="short")
async def short(body):
    print("began", flush=True)
    await asyncio.sleep(0.3)
    print("ended", flush=True)


@listen("long", queue="long")
async def long(body):
    print("began", flush=True)
    await asyncio.sleep(600)


@listen("long", queue="in_a_thread")
def in_a_thread(body):
    print("began", flush=True)
    time.sleep(600)


@listen("long", queue="waits_for_a_thread")
async def waits_for_a_thread(body):
    print("began", flush=True)
    await asyncio.to_thread(time.sleep, 600)


@listen("long", queue="stubborn")
async def stubborn(body):
    print("began", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


everything = (short, long)
nothing = []
number = 3
plain = [short, time.sleep]
other = Outbox(db_engine_url="sqlite:///other.db")
"""


@listen("order.created", queue="billing", retry_delays=(3600,))
async def billing(order: dict[str, int]) -> None:
    raise ConnectionError("the bank is away")


@listen("order.*", queue="broken")
async def broken(order: dict[str, int]) -> None:
    raise Reject(f"order {order['id']} is wrong")


async def bury(outbox: Outbox, count: int = 1, routing_key: str = "order.changed") -> list[int]:
    """Dead letters of the queue `broken`; their ids."""
    async with outbox.running(listeners=[broken]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, routing_key, [{"id": number} for number in range(count)])
        letters = await until(lambda: all_dead(outbox, count))
    return [letter.id for letter in letters]


async def all_dead(outbox: Outbox, count: int) -> list[Any]:
    """The dead letters, once there are so many."""
    letters = await outbox.dead_letters.list(limit=count)
    return letters if len(letters) == count else []


async def in_state(outbox: Outbox, state: str, count: int) -> bool:
    """Whether so many messages are in a state."""
    return len(await outbox.messages(state=state)) == count


def _read_to_the_end(descriptor: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # how Linux says that nobody is left at the other end
                raise
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


def _heed_interrupts() -> None:
    """A test run in the background of a shell ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
