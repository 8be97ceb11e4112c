"""PgBouncer: a private pooler in front of a PostgreSQL."""

import signal
from collections.abc import Mapping, Sequence
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from outbox.testing.servers.ladder import Rung, find, from_debian, installed
from outbox.testing.servers.private_server import PrivateServer
from outbox.testing.servers.programs import account


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
