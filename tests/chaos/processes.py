"""Processes: producers, relays and workers as the operating system sees them, and somebody who starts them again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.broker import Broker
from tests.chaos.database import Database
from tests.chaos.doorway import SECRET, Doorway
from tests.chaos.history import Historian
from tests.chaos.surroundings import Surroundings
from tests.chaos.tables import TABLE_NAME

ROOT = Path(__file__).parents[2]
CLOCK = Path(__file__).parent / "clock"

PRODUCER, RELAY, WORKER = "producer", "relay", "worker"

RECEIVER = "tests.chaos.receiver:app"
RELAY_RETRIES = ",".join(["1"] * 19)  # seconds between the attempts at what was refused

LOOK_EVERY = 0.05  # seconds
BACKOFF = 0.5  # seconds before a process that ended by itself is started again
_PARENT_DEATH_SIGNAL = 1

PATIENCE = 90.0  # seconds after which a process that does not heed SIGTERM is killed


@dataclass(frozen=True)
class Home:
    """What the processes of one service share."""

    database: Database
    broker: Broker | None
    listeners: str  # where its workers find them
    doorway: Doorway | None = None  # to the service that takes messages over HTTP
    is_behind_doorway: bool = False  # this is that service: its workers are what others post to


class Member:
    """A place in the crew: a process, and after its end the next one."""

    def __init__(
        self, role: str, number: int, home: Home, options: Mapping[str, str], here: Surroundings, rig: Historian
    ) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        self._number = number
        self._home = home
        self._options = options
        self._here = here
        self._rig = rig
        self.link = home.database.link(self.name)
        self.broker_link = home.broker.link(self.name) if home.broker else None
        self.http_link = home.doorway.link(self.name) if home.doorway and not home.is_behind_doorway else None
        self.incarnation = 0
        self.retired = False
        self._process: subprocess.Popen[bytes] | None = None
        self._told_at: float | None = None
        self._start_at = 0.0

    @property
    def title(self) -> str:
        """The name of the process at hand."""
        return f"{self.name}.{self.incarnation}"

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def is_at_work(self) -> bool:
        """Whether it has said so in its log."""
        if not self.runs:
            return False
        with self._log.open("rb") as log:
            return b" started" in log.read(20_000)

    def start(self, clock_shift: float = 0.0) -> None:
        self.incarnation += 1
        if self.link is not None:
            self.link.name = self.title
        here = Surroundings(**{**vars(self._here), "name": self.title})
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")},
            "OUTBOX_DB_ENGINE_URL": self._home.database.url_for(self._number, self.link),
            "OUTBOX_TABLE_NAME": TABLE_NAME,
            **self._options,
            **here.as_environment(),
        }
        if self.role == RELAY:
            environment |= self._home.database.for_relays(self.link)
        if self.broker_link is not None:
            environment["OUTBOX_RABBITMQ_URL"] = f"amqp://guest:guest@127.0.0.1:{self.broker_link.port}/?heartbeat=2"
        if self.http_link is not None:
            self.http_link.name = self.title
            environment |= {
                "OUTBOX_TRANSPORT": f"http://127.0.0.1:{self.http_link.port}/",
                "OUTBOX_WEBHOOK_SECRETS": SECRET,
                "OUTBOX_RELAY_RETRY_DELAYS": RELAY_RETRIES,
            }
        if clock_shift:
            paths = [str(CLOCK), os.environ.get("PYTHONPATH", "")]
            environment |= {"CHAOS_CLOCK_SHIFT": str(clock_shift), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._told_at = None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._command()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the rig
                preexec_fn=_die_with_the_rig,
            )

    def signal(self, what: signal.Signals) -> bool:
        """Send a signal; whether there was a process to send it to."""
        if self._process is None:
            return False
        if what in (signal.SIGKILL, signal.SIGTERM) and self._told_at is None:
            self._told_at = time.monotonic()
        self._process.send_signal(what)
        return True

    async def stop(self) -> None:
        """SIGTERM, and wait for the end; whoever tends the crew notes how it ended."""
        before = self.incarnation
        self.signal(signal.SIGTERM)
        while self.runs and self.incarnation == before:
            await asyncio.sleep(LOOK_EVERY)

    async def replace(self, clock_shift: float) -> None:
        """Stop it, and start the next one with another clock."""
        self.retired = True
        await self.stop()
        self.start(clock_shift)
        self.retired = False

    def tend(self) -> None:
        """Note its end, if it ended, and start it again."""
        if self._process is not None and self._process.poll() is not None:
            self._note_end(self._process)
        elif self._process is not None and self._told_at is not None and time.monotonic() - self._told_at > PATIENCE:
            self._process.kill()  # a violation, which the checker tells
        if self._process is None and not self.retired and time.monotonic() >= self._start_at:
            self.start()

    def kill(self) -> None:
        """Leave nothing behind."""
        self.retired = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.returncode
        at_work = self.is_at_work
        killed_itself = code == -signal.SIGKILL  # only a message with that fate, or the rig, does so
        told = self._told_at is not None or killed_itself
        seconds = 0.0 if self._told_at is None else time.monotonic() - self._told_at
        self._rig.note("ending", process=self.title, code=code, started=at_work, told=told, seconds=seconds)
        self._process = None
        self._start_at = time.monotonic() + (0.0 if told else BACKOFF)

    @property
    def _log(self) -> Path:
        return self._here.folder / "logs" / f"{self.title}.log"

    def _command(self) -> Sequence[str]:
        if self.role == PRODUCER:
            return "-m", "tests.chaos.producer", ("async", "sync")[self._number % 2]
        if self.role == RELAY:
            return "-m", "outbox", "relay"
        if self._home.doorway is not None and self._home.is_behind_doorway:
            return "-m", "uvicorn", RECEIVER, "--uds", str(self._home.doorway.socket), "--no-access-log"
        return "-m", "outbox", "worker", self._home.listeners


def _die_with_the_rig() -> None:
    """Ask the kernel to end this process when the one that started it ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Crew:
    """Everybody."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    def named(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    def of(self, *roles: str) -> list[Member]:
        return [member for member in self.members if member.role in roles]

    def is_at_work(self) -> bool:
        return all(member.is_at_work for member in self.members)

    async def tend(self) -> None:
        """Look after everybody, for ever. Producers begin when all queues are bound that their messages go to."""
        bound = False
        while True:
            bound = bound or all(member.is_at_work for member in self.members if member.role != PRODUCER)
            for member in self.members:
                if bound or member.role != PRODUCER:
                    member.tend()
            await asyncio.sleep(LOOK_EVERY)

    async def retire(self, *roles: str) -> None:
        """Stop those of a role for good; frozen ones go on first."""
        leaving = self.of(*roles)
        for member in leaving:
            member.retired = True
            member.signal(signal.SIGCONT)
        await asyncio.gather(*(member.stop() for member in leaving))

    def kill(self) -> None:
        for member in self.members:
            member.kill()
