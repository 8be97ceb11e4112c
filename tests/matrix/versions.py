"""Versions: what the matrix runs, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

OLDEST_SQLITE = "3.35.2"
THIS_PYTHON = "3.11"  # of the tests on servers and databases: one thing differs at a time

CONTRACTS = ("tests/contract", "tests/walk", "tests/compatibility")
# A standby that is promoted keeps a slot from PostgreSQL 17 on.
ON_POSTGRESQL = (*CONTRACTS, "tests/chaos/test_failover_slots.py")
# Another Python or other dependencies can change what lies below the contracts, too.
EVERY_PART = ("tests/contract", "tests/walk", "tests/compatibility", "tests/unit", "tests/amqp", "tests/hostile")


@dataclass(frozen=True)
class Tree:
    """A distribution's suite, unpacked: its own packages, and some of another suite that it lacks."""

    suite: str
    packages: tuple[str, ...]
    other: str = ""  # a suite for what this one has not
    of_other: tuple[str, ...] = ()


def is_ubuntu(suite: str) -> bool:
    return suite in ("jammy", "noble")


@dataclass(frozen=True)
class Version:
    """One line of the table."""

    name: str
    says: str  # what the table calls it
    belongs: str  # which tests: those of postgresql, mysql, rabbitmq or sqlite, or all
    tests: Sequence[str] = CONTRACTS
    python: str = THIS_PYTHON
    tree: Tree | None = None  # None: on this machine
    dependencies: str = field(default="locked")  # or oldest, newest
    sqlite: str = ""  # a SQLite to build
    on_mysql: bool = False  # what runs on MariaDB elsewhere


_TOOLS = ("python3-pip-whl", "ca-certificates", "openssl", "pgbouncer", "procps", "make", "git")

BOOKWORM = Tree("bookworm", (*_TOOLS, "postgresql-15", "mariadb-server-core", "rabbitmq-server", "python3.11"))
OLDER_POSTGRESQL = Tree("bookworm", (*_TOOLS, "python3.11"), "jammy", ("postgresql-14",))
NOBLE = Tree("noble", (*_TOOLS, "postgresql-16", "mariadb-server-core", "rabbitmq-server", "python3.12"))
TRIXIE = Tree(
    "trixie",
    (*_TOOLS, "postgresql-17", "mariadb-server-core", "rabbitmq-server", "python3.13", "ubuntu-archive-keyring"),
    "bookworm",
    ("python3.11",),
)
SID = Tree(
    "sid",
    (*_TOOLS, "postgresql-18", "mariadb-server-core", "rabbitmq-server", "python3.14"),
    "bookworm",
    ("python3.11",),
)
# MySQL's package excludes MariaDB's.
MYSQL_8 = Tree("bookworm", (*_TOOLS, "python3.11"), "jammy", ("mysql-server-core-8.0",))
MYSQL_9 = Tree("sid", (*_TOOLS, "mysql-server-core"), "bookworm", ("python3.11",))

VERSIONS = (
    Version("python-3.11", "Python 3.11", "all", EVERY_PART, "3.11", BOOKWORM),
    Version("python-3.12", "Python 3.12", "all", EVERY_PART, "3.12", NOBLE),
    Version("python-3.13", "Python 3.13", "all", EVERY_PART, "3.13", TRIXIE),
    Version("python-3.14", "Python 3.14", "all", EVERY_PART, "3.14", SID),
    Version("postgresql-14", "PostgreSQL 14", "postgresql", ON_POSTGRESQL, tree=OLDER_POSTGRESQL),
    Version("postgresql-15", "PostgreSQL 15", "postgresql", ON_POSTGRESQL, tree=BOOKWORM),
    Version("postgresql-17", "PostgreSQL 17", "postgresql", ON_POSTGRESQL, tree=TRIXIE),
    Version("postgresql-18", "PostgreSQL 18", "postgresql", ON_POSTGRESQL, tree=SID),
    Version("mariadb-10.11", "MariaDB 10.11", "mysql", tree=BOOKWORM),
    Version("mariadb-11.8", "MariaDB 11.8", "mysql", tree=TRIXIE),
    Version("mysql-8.0", "MySQL 8.0", "mysql", tree=MYSQL_8, on_mysql=True),
    Version("mysql-9", "MySQL 9", "mysql", tree=MYSQL_9, on_mysql=True),
    Version("rabbitmq-3.10", "RabbitMQ 3.10", "rabbitmq", tree=BOOKWORM),
    Version("rabbitmq-4.0", "RabbitMQ 4.0", "rabbitmq", tree=TRIXIE),
    Version("rabbitmq-4.3", "RabbitMQ 4.3", "rabbitmq", tree=SID),
    Version(f"sqlite-{OLDEST_SQLITE}", f"SQLite {OLDEST_SQLITE}", "sqlite", sqlite=OLDEST_SQLITE),
    Version("dependencies-oldest", "the oldest dependencies", "all", EVERY_PART, dependencies="oldest"),
    Version("dependencies-newest", "the newest dependencies", "all", EVERY_PART, dependencies="newest"),
)


def choose(names: Sequence[str]) -> list[Version]:
    """These versions by their names; all if none is named."""
    known = {version.name: version for version in VERSIONS}
    for name in names:
        if name not in known:
            raise SystemExit(f"no version is called {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(VERSIONS)
