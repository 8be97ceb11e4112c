"""Fixtures that every tier of tests shares: real databases, each test with tables of its own."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy

pytest.register_assert_rewrite(
    "outbox.testing.store",
    "outbox.testing.transport",
    "outbox.testing.store_contract",
    "outbox.testing.transport_contract",
    "outbox.testing.publishing_contract",
)

from outbox import Outbox  # noqa: E402 - after pytest was told whose assertions to explain
from outbox.testing import servers  # noqa: E402
from outbox.testing.servers import PgBouncer, Server, postgresql  # noqa: E402
from tests.support.broker import VirtualHost  # noqa: E402
from tests.support.contracts import told  # noqa: E402
from tests.support.databases import DATABASES, WAL, url_on  # noqa: E402
from tests.support.mariadb import shared_server, statement  # noqa: E402
from tests.support.needs import needs_server  # noqa: E402
from tests.support.observing import Recorder, eventually  # noqa: E402
from tests.support.outboxes import MakeOutbox, dropped  # noqa: E402

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A real PostgreSQL for the whole run, as `postgresql://…`."""
    with postgresql() as server:
        yield server.url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """A real MariaDB for the whole run, as `mariadb://…`; a MySQL, as `mysql://…`, where that is asked for."""
    with shared_server() as server:
        yield server.url


@pytest.fixture
def mariadb_database(mariadb_url: str) -> Iterator[str]:
    """A fresh database of that MariaDB, as `mariadb://…`, where a table name of its own is not enough."""
    name = f"t{os.getpid()}_{next(_numbers)}"
    statement(mariadb_url, f"CREATE DATABASE {name}")
    yield urlsplit(mariadb_url)._replace(path=f"/{name}").geturl()
    statement(mariadb_url, f"DROP DATABASE {name}")


@pytest.fixture(scope="session")
def pgbouncer(postgresql_url: str) -> Iterator[PgBouncer]:
    """A pooler with few connections to that PostgreSQL; whoever waits too long for one is told so."""
    with PgBouncer(postgresql_url, pool_size=3, settings={"query_wait_timeout": "30"}) as pooler:
        yield pooler


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[Server]:
    """A real RabbitMQ for the whole run; whoever wants to stop or kill one starts a RabbitMQ() of its own."""
    # What its management interface tells is up to a second old, and not up to five.
    with servers.rabbitmq(settings={"collect_statistics_interval": "1000"}) as server:
        yield server


@pytest.fixture
def vhost(rabbitmq: Server) -> Iterator[VirtualHost]:
    """A fresh virtual host of that RabbitMQ: `vhost.url` is what to connect to."""
    host = VirtualHost(rabbitmq, f"t{os.getpid()}_{next(_numbers)}")
    host.create()
    yield host
    host.delete()


@pytest.fixture
def rabbitmq_url(vhost: VirtualHost) -> str:
    """`amqp://…`, of a fresh virtual host."""
    return vhost.url


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every database and driver in turn."""
    return url_on(request, request.param, tmp_path)


@pytest.fixture
def recorder() -> Recorder:
    """To give to an outbox as an observer."""
    return Recorder()


@pytest.fixture
def table_name() -> str:
    """Tests share a server, never a table."""
    return f"t{os.getpid()}_{next(_numbers)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sqlalchemy", help="run only on this version of SQLAlchemy, or one that begins like it")
    parser.addoption("--no-servers", action="store_true", help="leave out what speaks to a server, or starts one")
    parser.addoption("--every-driver", action="store_true", help="run what lies above the drivers on each of them, too")


def pytest_report_header() -> str:
    return f"SQLAlchemy {sqlalchemy.__version__}"


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--sqlalchemy")
    if wanted and not sqlalchemy.__version__.startswith(f"{wanted}."):
        raise pytest.UsageError(f"SQLAlchemy {wanted} is wanted, and this is {sqlalchemy.__version__}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests, which are there to the end: the garbage collector need not go through them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# These speak to the store, whose contract every driver fulfils: PostgreSQL's second driver tells nothing more here.
ABOVE_THE_DRIVERS = frozenset(
    {
        "test_batch_crashes",
        "test_batches",
        "test_circuits",
        "test_command_line",
        "test_command_line_processes",
        "test_crashes",
        "test_doctor",
        "test_hanging",
        "test_http",
        "test_http_outages",
        "test_http_app",
        "test_http_replays",
        "test_inbox_rules",
        "test_lanes",
        "test_on_error",
        "test_processes",
        "test_publishing",
        "test_rabbitmq_batches",
        "test_receive",
        "test_refusing",
        "test_relay",
        "test_routes",
        "test_routing",
        "test_services",
        "kbairak_outbox/test_listeners",
        "kbairak_outbox/test_retries",
        "kbairak_outbox/test_setup_and_logging",
        "kbairak_outbox/test_shutdown",
        "faststream_outbox/test_claiming",
        "faststream_outbox/test_dead_letters",
        "faststream_outbox/test_leases",
        "faststream_outbox/test_timers",
        "pg_transactional_outbox/test_retries",
        "test_store_first",
        "test_testing",
        "test_testing_deliveries",
        "test_transactional",
        "test_worker",
    }
)


# What is asked of MariaDB too. The rest speaks to the store, whose contract it fulfils.
ON_MARIADB = frozenset(
    {
        "test_stores",
        "test_smoke",
        "test_callers_transactions",
        "test_listener_transactions",
        "test_transactional",
        "test_inbox_rules",
        "test_circuits",
        "test_command_line",
        "test_tables_check",
        "test_testing",
        "test_store_first",
        "test_databases",
        "test_snapshots",
        "test_costs",
        "test_lost_connections",
        "test_joined_sessions",
        "test_model",
    }
)


def _is_one_of_all(item: pytest.Item) -> bool:
    """Whether a test runs on every database, and does not name those that it is for."""
    named = [mark.args[1] for mark in item.iter_markers("parametrize") if "database_url" in mark.args[0]]
    return all(set(DATABASES) <= set(names) for names in named)


def _file(item: pytest.Item) -> str:
    """Its name; that of another project's behaviour with the project."""
    folder, name = item.path.parent, item.path.stem
    return f"{folder.name}/{name}" if folder.parent.name == "compatibility" else name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tiers whose files take long come first: of two side by side, neither waits for the other at the end."""
    tiers = ("chaos", "walk", "hostile", "contract", "docs", "compatibility", "typing", "model", "amqp", "unit")
    folder = Path(__file__).parent
    items.sort(key=lambda item: tiers.index(item.path.relative_to(folder).parts[0]))
    left_out: set[pytest.Item] = set()
    if not config.getoption("--every-driver"):
        left_out |= {
            item
            for item in items
            if ("psycopg" in item.name and _file(item) in ABOVE_THE_DRIVERS)
            or (_is_one_of_all(item) and "mariadb+" in item.name and _file(item) not in ON_MARIADB)
        }
    if config.getoption("--no-servers"):
        left_out |= {item for item in items if needs_server(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many cases of each contract ran: a contract that shrinks is a promise that went missing."""
    for line in told(terminalreporter.stats):
        terminalreporter.write_line(line)


@pytest.fixture
async def make_outbox(request: pytest.FixtureRequest, database_url: str, table_name: str) -> AsyncIterator[MakeOutbox]:
    """Outboxes on the database at hand; more than one share the table, as processes would."""
    made: list[Outbox] = []
    callspec = getattr(request.node, "callspec", None)
    from_log = callspec is not None and callspec.params.get("database_url") == WAL
    feed = {"relay_from": "wal", "slot_in_use_delay": 0.1} if from_log else {}

    def make(**options: Any) -> Outbox:
        defaults = {"db_engine_url": database_url, "table_name": table_name, "poll_interval": 0.2, **feed}
        if "db_engine" in options:
            del defaults["db_engine_url"]
        outbox = Outbox(**{**defaults, **options})
        made.append(outbox)
        return outbox

    if from_log:
        await make().create_tables()
        await made[0].wal.create()
    yield make
    if from_log:
        await eventually(lambda: dropped(made[0]))
    for outbox in made:
        await outbox.close()


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    """One outbox on the database at hand."""
    return make_outbox()
