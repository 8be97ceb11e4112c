"""MySQL: a private server, from the programs that this machine has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from outbox.testing.servers.ladder import Absent, Rung, find, installed
from outbox.testing.servers.private_server import PrivateServer
from outbox.testing.servers.programs import Programs, account

# One statement a line; the server runs the file when it makes its data. It has no strong password to ask for then.
_FIRST = """\
CREATE DATABASE outbox;
CREATE USER outbox@'%';
GRANT ALL ON *.* TO outbox@'%' WITH GRANT OPTION;
"""

_NO_SYNC = {"innodb-flush-method": "nosync", "sync-binlog": "0"}


def no_mariadb(rung: Rung) -> Rung:
    """MariaDB's packages have a program of this name too."""

    def only_mysql() -> Programs | Absent:
        found = rung()
        if isinstance(found, Programs) and Path(found.folder / "mysqld").resolve().name == "mariadbd":
            return Absent(f"installed: {found.folder}/mysqld is MariaDB")
        return found

    return only_mysql


class MySQL(PrivateServer):
    """A private MySQL: its user `outbox` may do everything, and needs no password over loopback."""

    name = "mysql"

    LADDER: ClassVar[tuple[Rung, ...]] = (no_mariadb(installed("mysqld", folders="/usr/sbin")),)
    ADVICE: ClassVar[str] = (
        "Install MySQL (Ubuntu: apt-get install mysql-server), or name a server of yours: "
        "OUTBOX_TEST_MYSQL_URL=mysql://user:password@host:3306/database"
    )

    def __init__(
        self,
        *,
        fsync: bool = False,
        settings: Mapping[str, str] | None = None,  # further options of the server, without their dashes
        ladder: Sequence[Rung] = LADDER,
    ) -> None:
        super().__init__(find("MySQL", ladder, self.ADVICE))
        self._settings = {
            **({} if fsync else _NO_SYNC),
            "innodb-flush-log-at-trx-commit": "1" if fsync else "2",
            "innodb-use-native-aio": "0",  # a container may have none
            "innodb-buffer-pool-size": "256M",
            "max-connections": "300",
            "skip-name-resolve": "1",
            "mysqlx": "0",
            "secure-file-priv": "NULL",  # a package's folder may be closed to our account
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"mysql://outbox@127.0.0.1:{self.port}/outbox"

    def _prepare(self) -> None:
        file = self.folder / "first.sql"
        file.write_text(_FIRST)
        account().owns(file)
        make = ["mysqld", "--no-defaults", "--initialize-insecure", *self._places(), f"--init-file={file}"]
        self.programs.run(make, folder=self.folder)

    def _command(self) -> list[str]:
        address = ["--bind-address=127.0.0.1", f"--port={self.port}", f"--socket={self.folder}/server.socket"]
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return ["mysqld", "--no-defaults", *self._places(), *address, *settings]

    def _is_ready(self, process_id: int) -> bool:
        return "ready for connections" in self._said()

    def _places(self) -> list[str]:
        return [f"--datadir={self.folder}/data", f"--pid-file={self.folder}/server.pid", f"--tmpdir={self.folder}"]

    def _last_words(self) -> str:
        errors = [line.partition("[ERROR] ")[2] for line in self._said().splitlines() if "[ERROR]" in line]
        return "\n".join(errors)[:2000] or super()._last_words()
