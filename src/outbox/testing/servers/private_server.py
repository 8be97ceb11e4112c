"""Private server: one process of our own on a loopback port, gone when this process is gone."""

import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from outbox.testing.servers.programs import Programs, ServerFailed, account

_PATIENCE = 60.0  # seconds a server may take to come up or to go down
_PORTS_TO_TRY = 5  # another program may take a free port before the server does


class PrivateServer(ABC):
    """A server with a folder of its own; it may be stopped, killed, and started again on the same data.

    A new kind of server says how its data is prepared, which command runs it, and when it is ready.
    """

    name: ClassVar[str]
    orderly: ClassVar[signal.Signals] = signal.SIGTERM  # asks the server to end at once and in good order
    final: ClassVar[signal.Signals | None] = None  # ends it for good, where the orderly way takes too long
    port_taken: ClassVar[re.Pattern[str]] = re.compile("Address already in use")  # how its log tells that

    port: int

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.how = programs.how
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the server answers; names no driver."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make the data in the folder, before the first start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The program and its arguments."""

    def _variables(self) -> Mapping[str, str]:
        """What the command needs in its environment, beside what every program gets."""
        return {}

    @abstractmethod
    def _is_ready(self, process_id: int) -> bool:
        """Whether the server answers."""

    def __enter__(self) -> Self:
        self.folder = _temporary_folder(f"outbox-{self.name}-")
        self._log = self.folder / "server.log"
        self._guardian = _Guardian(self.folder, self.final or self.orderly)
        try:
            self._prepare()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, again on the same port, and wait until it is ready."""
        if self._process is not None:
            return
        self._last_one_gone, inherited = os.pipe()
        with self._log.open("a") as log:
            self._begun_at = log.tell()
            self._process = self.programs.start(
                self._command(),
                folder=self.folder,
                output=log,
                variables=self._variables(),
                inherited=[inherited],
            )
        os.close(inherited)
        self._guardian.watch(self._process.pid)
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """Stop the server in good order; its data stays for the next start."""
        self._end(self.orderly)

    def kill(self) -> None:
        """Kill the server and all its processes with SIGKILL, as a crash would; its data stays as it is."""
        if self._process is None:
            return
        # The first process before its children, or it would see them die and begin to clean up.
        for process_id in [self._process.pid, *descendants(self._process.pid)]:
            _signal(process_id, signal.SIGKILL)
        self._wait_until_gone(self._process)

    def close(self) -> None:
        """End the server and remove its folder."""
        self._guardian.release()
        if self._process is not None:
            self._wait_until_gone(self._process)
        self._guardian.wait()

    def _start_on_a_free_port(self) -> None:
        for remaining in reversed(range(_PORTS_TO_TRY)):
            self.port = free_port()
            try:
                self.start()
            except ServerFailed:
                if not remaining or not self.port_taken.search(self._said()):
                    raise
            else:
                return

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready(process.pid):
            if process.poll() is not None:
                self._wait_until_gone(process)
                raise ServerFailed(f"{self.name} ended with code {process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} is not ready after {_PATIENCE:.0f} s: {self._last_words()}")
            time.sleep(0.01)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            _signal(self._process.pid, how)
            self._wait_until_gone(self._process)

    def _wait_until_gone(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first process and then for the last one: a child may hold on to the data."""
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"{self.name} still runs after {_PATIENCE:.0f} s: {self._last_words()}") from None
        # Every process of the server inherited the other end of this pipe; it closes with the last of them.
        last_one_gone = select.poll()
        last_one_gone.register(self._last_one_gone)
        ended = last_one_gone.poll(_PATIENCE * 1000)
        os.close(self._last_one_gone)
        self._process = None
        self._guardian.watch(None)
        if not ended:
            raise ServerFailed(f"{self.name} left processes behind: {self._last_words()}")

    def _last_words(self) -> str:
        return self._said()[-2000:].strip() or "it wrote no log"

    def _said(self) -> str:
        """What the server wrote to its log since it was last started."""
        with self._log.open(errors="replace") as log:
            log.seek(self._begun_at)
            return log.read()


class _Guardian:
    """A shell that outlives us for a moment: it ends the server and removes its folder when its input ends.

    That happens on `release`, and just as well when we exit, are terminated, or are killed.
    """

    _SCRIPT = """
        server=
        while read -r line; do server=$line; done
        if [ -n "$server" ]; then
            kill -s "$1" "$server"
            looks=0
            # A zombie is gone too: in a container there may be no init to bury it.
            while kill -0 "$server" && ! grep -q "^State:.*Z" "/proc/$server/status" && [ $looks -lt 1000 ]; do
                sleep 0.02
                looks=$((looks + 1))
            done
            kill -s KILL -- "-$server"
        fi
        rm -rf -- "$2"
    """

    def __init__(self, folder: Path, how: signal.Signals) -> None:
        name = how.name.removeprefix("SIG")
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "guardian", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, process_id: int | None) -> None:
        """Name the process to end, or none."""
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.write(b"%d\n" % process_id if process_id else b"\n")
            self._shell.stdin.flush()

    def release(self) -> None:
        if self._shell.stdin is not None:
            self._shell.stdin.close()

    def wait(self) -> None:
        self._shell.wait(_PATIENCE)


def _temporary_folder(prefix: str) -> Path:
    usual = tempfile.gettempdir()
    reachable = usual if account().may_run(Path(usual)) else "/tmp"  # noqa: S108 - mkdtemp takes a fresh name
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=reachable))
    account().owns(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(process_id: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, what)


def descendants(process_id: int) -> list[int]:
    """The children of a process and theirs; none on systems without /proc."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [process_id]
    for parent in found:  # grows while it is walked
        found += children.get(parent, [])
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent …", where the name may itself contain parentheses
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(folder.name), int(words[1])
