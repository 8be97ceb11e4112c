"""MySQL for tests: a server that is named, or installed; what MariaDB calls mysqld is none."""

from pathlib import Path

import pytest

from outbox.testing.servers import GivenServer, MySQL, ServerMissing, mysql
from outbox.testing.servers.ladder import installed
from outbox.testing.servers.mysql_server import no_mariadb


def test_a_server_named_by_its_variable_is_taken_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_MYSQL_URL", "mysql://somebody@elsewhere/database")
    with mysql() as server:
        assert server == GivenServer("mysql://somebody@elsewhere/database", "named by OUTBOX_TEST_MYSQL_URL")


def test_without_a_server_the_error_says_what_to_install() -> None:
    with pytest.raises(ServerMissing) as raised:
        MySQL(ladder=[installed("no-such-program", folders="/no/such/folder")])
    assert str(raised.value).splitlines()[0] == "no MySQL for the tests:"
    for advice in ("apt-get install mysql-server", "OUTBOX_TEST_MYSQL_URL=mysql://"):
        assert advice in str(raised.value)


def test_a_mysqld_that_is_mariadb_is_not_taken(reachable: Path) -> None:
    (reachable / "mariadbd").write_text("#!/bin/sh\n")
    (reachable / "mariadbd").chmod(0o755)
    (reachable / "mysqld").symlink_to("mariadbd")
    with pytest.raises(ServerMissing, match="mysqld is MariaDB"):
        MySQL(ladder=[no_mariadb(installed("mysqld", folders=str(reachable)))])
