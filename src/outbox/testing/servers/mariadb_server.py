"""MariaDB: a private server, from the programs that the ladder finds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from outbox.testing.servers.ladder import Rung, find, from_debian, installed
from outbox.testing.servers.private_server import PrivateServer
from outbox.testing.servers.programs import ServerFailed, account

# Debian's default for databases: it compares without regard to case and to spaces at the end.
_DATABASE = "CREATE DATABASE outbox CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci;"

# The server reads one statement after the other from its standard input, which needs neither a client nor a password.
_BOOTSTRAP = 'exec "$0" "$@" < bootstrap.sql'

_NO_SYNC = {"debug-no-sync": "1", "innodb-flush-method": "nosync"}


class MariaDB(PrivateServer):
    """A private MariaDB: its user `outbox` may do everything, and needs no password over loopback."""

    name = "mariadb"

    LADDER: ClassVar[tuple[Rung, ...]] = (
        installed("mariadbd", folders="/usr/sbin"),
        from_debian("mariadb-server-core", folders="usr/sbin"),
    )
    ADVICE: ClassVar[str] = (
        "Install MariaDB (Debian, Ubuntu: apt-get install mariadb-server), or name a server of yours: "
        "OUTBOX_TEST_MARIADB_URL=mariadb://user:password@host:3306/database"
    )

    def __init__(
        self,
        *,
        fsync: bool = False,  # on for benchmarks; a crash of the server alone loses nothing without it
        settings: Mapping[str, str] | None = None,  # further options of the server, without their dashes
        ladder: Sequence[Rung] = LADDER,
    ) -> None:
        super().__init__(find("MariaDB", ladder, self.ADVICE))
        self._settings = {
            **({} if fsync else _NO_SYNC),
            # 2 hands every commit to the operating system, so that it outlives a `kill`; 0 would lose a second.
            "innodb-flush-log-at-trx-commit": "1" if fsync else "2",
            "innodb-use-native-aio": "0",  # a container may have none
            "innodb-buffer-pool-size": "256M",
            "max-connections": "300",
            "skip-name-resolve": "1",
            "character-set-server": "utf8mb4",
            "collation-server": "utf8mb4_general_ci",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"mariadb://outbox@127.0.0.1:{self.port}/outbox"

    def _prepare(self) -> None:
        (self.folder / "data").mkdir()
        account().owns(self.folder / "data")
        messages = self._messages()
        # Newer versions name these files after MariaDB, and need no tables of their own for the performance schema.
        tables = [
            file.read_text(errors="surrogateescape")
            for name in ("system_tables", "performance_tables", "system_tables_data")
            for file in sorted(messages.glob(f"m*_{name}.sql"))
        ]
        script = "\n".join(
            [
                *("CREATE DATABASE mysql;", "USE mysql;", "SET @auth_root_socket=NULL;", "SET @skip_auth_anonymous=1;"),
                *tables,
                *(_DATABASE, "FLUSH PRIVILEGES;"),
                *("CREATE USER outbox@'%';", "GRANT ALL ON *.* TO outbox@'%' WITH GRANT OPTION;", ""),
            ]
        )
        file = self.folder / "bootstrap.sql"
        file.write_text(script, errors="surrogateescape")
        account().owns(file)
        bootstrap = ["--no-defaults", "--bootstrap", *self._places(), *_options(_NO_SYNC), "--log-warnings=0"]
        command = ["/bin/sh", "-c", _BOOTSTRAP, str(self.programs.folder / "mariadbd"), *bootstrap]
        self.programs.run(command, folder=self.folder)

    def _command(self) -> list[str]:
        # Without a socket file: a temporary folder's path may be too long for one.
        address = ["--bind-address=127.0.0.1", f"--port={self.port}", "--socket="]
        return ["mariadbd", "--no-defaults", *self._places(), *address, *_options(self._settings)]

    def _is_ready(self, process_id: int) -> bool:
        return "ready for connections" in self._said()

    def _places(self) -> list[str]:
        """Where the programs find what belongs to them; unpacked ones would search the folders of an installation."""
        base = self.programs.folder.parent
        return [
            f"--basedir={base}",
            f"--lc-messages-dir={self._messages()}",
            f"--plugin-dir={base}/lib/mysql/plugin",
            f"--datadir={self.folder}/data",
            f"--pid-file={self.folder}/server.pid",
            f"--tmpdir={self.folder}",
        ]

    def _messages(self) -> Path:
        base = self.programs.folder.parent / "share"
        for folder in (base / "mysql", base / "mariadb", base):
            if (folder / "english/errmsg.sys").exists():
                return folder
        raise ServerFailed(f"mariadb: {base} has no messages of the server, so this installation is not whole")

    def _last_words(self) -> str:
        errors = [line.partition("[ERROR] ")[2] for line in self._said().splitlines() if "[ERROR]" in line]
        return "\n".join(errors)[:2000] or super()._last_words()


def _options(settings: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]
