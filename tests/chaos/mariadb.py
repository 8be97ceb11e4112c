"""MariadbDatabase: what the rig asks of MariaDB."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

import pymysql
from sqlalchemy import URL, Connection, make_url, text

from outbox.testing.servers import MariaDB
from tests.chaos import deadlocks, tables
from tests.chaos.database import ServerDatabase
from tests.chaos.mysql_proxy import MysqlLink
from tests.support.mariadb import statement
from tests.support.proxy import Link, Proxy

# In UTC, as the times are that the library writes. With a log that outlives a crash of the server.
SETTINGS = {"default-time-zone": "+00:00"}
MOST_LOCKED = 20  # messages that a foreign transaction locks
_PROCESSES = "SELECT id FROM information_schema.processlist WHERE user REGEXP '^[a-z]+-'"


class MariadbDatabase(ServerDatabase):
    """A private server, to which every process says its name as its user: triggers know it by nothing else."""

    def _start(self, stack: ExitStack) -> None:
        self._server = stack.enter_context(MariaDB(settings=SETTINGS))
        statement(self._server.url, "CREATE USER ''@'%'")  # whatever a process calls itself
        statement(self._server.url, "GRANT ALL ON *.* TO ''@'%'")
        self._proxy = stack.enter_context(Proxy())

    def _make_tables(self) -> None:
        super()._make_tables()
        with self.connection() as connection:
            deadlocks.metadata.create_all(connection)

    @property
    def url(self) -> URL:
        return make_url(self._server.url).set(drivername="mysql+pymysql")

    def url_for(self, number: int, link: Link | None) -> str:
        assert link is not None
        url = self.url.set(drivername="mysql+asyncmy", username=link.name, port=link.port)
        return url.render_as_string(hide_password=False)

    def link(self, name: str) -> Link:
        return self._proxy.opened(lambda loop: MysqlLink(name, [self._server.port], loop))

    def crash(self) -> None:
        self._server.kill()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def recover(self) -> None:
        deadline = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline:
                raise TimeoutError("MariaDB does not answer")
            time.sleep(0.1)

    def terminate_backends(self, share: float) -> int:
        with self.connection() as connection:
            found = connection.scalars(text(f"{_PROCESSES} AND RAND() < :share"), {"share": share}).all()
        ended = 0
        for number in found:
            with suppress(pymysql.Error):  # it has ended by itself
                statement(self._server.url, f"KILL {number}")
                ended += 1
        return ended

    def open_sessions(self) -> int:
        with self.connection() as connection:
            return len(connection.execute(text(_PROCESSES)).all())

    def provoke_deadlocks(self) -> int:
        """Lock messages from the last to the first, then the whole inbox; how many transactions the server ended."""
        before = self._deadlocks()
        with suppress(pymysql.Error), deadlocks.Opponent(self._server.url) as opponent:
            execute = opponent.cursor.execute
            execute("SET innodb_lock_wait_timeout = 3")
            execute(
                f"SELECT id FROM {tables.TABLE_NAME} WHERE lease_token IS NOT NULL ORDER BY id DESC LIMIT {MOST_LOCKED}"
            )
            for (row,) in opponent.cursor.fetchall():
                execute(f"SELECT id FROM {tables.TABLE_NAME} WHERE id = %s FOR UPDATE", [row])
            execute(f"SELECT count(*) FROM {tables.TABLE_NAME}_inbox FOR UPDATE")
        return self._deadlocks() - before

    def _deadlocks(self) -> int:
        with self.connection() as connection:
            return int(connection.execute(text("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")).one()[1])

    def _answers(self) -> bool:
        try:
            with self.connection() as connection:
                return _one(connection) == 1
        except Exception:  # noqa: BLE001 - drivers throw what they like
            return False


def _one(connection: Connection) -> int:
    return connection.scalar(text("SELECT 1")) or 0
