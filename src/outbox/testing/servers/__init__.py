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

    with mariadb() as server:               # by the ladder; MariaDB() is always private
        connect(server.url)

    with rabbitmq() as broker:              # by the ladder, like RabbitMQ() always private
        connect(broker.url)

Nothing else in `outbox.testing` imports this package: who starts no server pays for none of it.
`python -m outbox.testing.servers postgresql` runs one until Ctrl-C, as do `mariadb` and `rabbitmq`; with `--download`
it may download packages.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from outbox.testing.servers.ladder import ServerMissing
from outbox.testing.servers.mariadb_server import MariaDB
from outbox.testing.servers.pgbouncer import PgBouncer
from outbox.testing.servers.postgresql_server import PostgreSQL
from outbox.testing.servers.programs import ServerFailed
from outbox.testing.servers.rabbitmq_server import RabbitMQ

__all__ = [
    "GivenServer",
    "MariaDB",
    "PgBouncer",
    "PostgreSQL",
    "RabbitMQ",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "mariadb",
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
    """A server that the user started and named; it is not ours to stop."""

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
def mariadb(*, fsync: bool = False, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A MariaDB by the ladder; the options are for a private one."""
    given = _given("mariadb")
    if given:
        yield given
    else:
        with MariaDB(fsync=fsync, settings=settings) as server:
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


def _given(name: str) -> GivenServer | None:
    variable = f"OUTBOX_TEST_{name.upper()}_URL"
    url = os.environ.get(variable)
    return GivenServer(url, f"named by {variable}") if url else None


SERVERS: Mapping[str, Callable[[], AbstractContextManager[Server]]] = {
    "mariadb": mariadb,
    "postgresql": postgresql,
    "rabbitmq": rabbitmq,
}
