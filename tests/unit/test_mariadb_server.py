"""MariaDB for tests: the life of a private server, and databases that share one."""

import time
from pathlib import Path

import pymysql
import pytest

from outbox.testing.servers import GivenServer, MariaDB, ServerFailed, ServerMissing, mariadb
from outbox.testing.servers.ladder import from_debian, installed
from tests.support.mariadb import arguments, statement
from tests.unit.folders import wait_until_empty

pytestmark = pytest.mark.servers


def test_a_server_named_by_its_variable_is_taken_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_MARIADB_URL", "mariadb://somebody@elsewhere/database")
    with mariadb() as server:
        assert server == GivenServer("mariadb://somebody@elsewhere/database", "named by OUTBOX_TEST_MARIADB_URL")


def test_without_the_variable_a_private_server_is_started_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_TEST_MARIADB_URL", raising=False)
    with mariadb(fsync=True, settings={"max-connections": "33"}) as server:
        asked = "SELECT @@max_connections, @@innodb_flush_log_at_trx_commit, @@collation_database"
        assert statement(server.url, asked) == [(33, 1, "utf8mb4_general_ci")]


def test_without_a_server_the_error_names_all_that_was_tried_and_what_to_install() -> None:
    with pytest.raises(ServerMissing) as raised:
        MariaDB(ladder=[installed("no-such-program", folders="/no/such/folder")])
    assert str(raised.value).splitlines()[:2] == [
        "no MariaDB for the tests:",
        "  - installed: neither /no/such/folder nor the PATH has no-such-program",
    ]
    for advice in ("apt-get install mariadb-server", "OUTBOX_TEST_MARIADB_URL=mariadb://"):
        assert advice in str(raised.value)


LADDERS = {"as found": MariaDB.LADDER, "from Debian packages": [from_debian("mariadb-server-core", folders="usr/sbin")]}


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_a_server_that_was_killed_or_stopped_starts_again_on_the_same_data(
    ladder: list[object], reachable: Path
) -> None:
    with MariaDB(ladder=ladder) as server:  # type: ignore[arg-type]
        url = server.url
        statement(url, "CREATE TABLE fact (word VARCHAR(20)) ENGINE=InnoDB")
        with pymysql.connect(**arguments(url)) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO fact VALUES ('committed')")
            connection.commit()
            cursor.execute("UPDATE fact SET word = 'not committed'")
            server.kill()
            with pytest.raises(pymysql.OperationalError):
                connection.commit()
            connection._force_close()
        with pytest.raises(pymysql.OperationalError):
            statement(url, "SELECT 1")

        server.start()

        assert server.url == url
        assert statement(url, "SELECT word FROM fact") == [("committed",)]
        server.stop()
        server.stop()  # a second time is no error
        server.start()
        assert statement(url, "SELECT word FROM fact") == [("committed",)]
    wait_until_empty(reachable)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind(reachable: Path) -> None:
    with pytest.raises(ServerFailed, match="unknown variable 'nonsense=1'"):
        MariaDB(settings={"nonsense": "1"}).__enter__()
    wait_until_empty(reachable)


def test_its_user_may_make_users_and_a_stop_does_not_wait_for_sessions() -> None:
    with MariaDB() as server:
        statement(server.url, "CREATE USER shop@'%' IDENTIFIED BY 'secret'")
        statement(server.url, "GRANT SELECT ON outbox.* TO shop@'%'")
        idle = pymysql.connect(**{**arguments(server.url), "user": "shop", "password": "secret"})
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 10
        idle._force_close()


def test_a_database_of_a_test_is_its_own(mariadb_url: str, mariadb_database: str) -> None:
    assert arguments(mariadb_database)["database"] != arguments(mariadb_url)["database"]
    statement(mariadb_database, "CREATE TABLE fact (word VARCHAR(20)) ENGINE=InnoDB")
    assert statement(mariadb_database, "SHOW TABLES") == [("fact",)]
