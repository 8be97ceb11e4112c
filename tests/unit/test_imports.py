"""Imports: `import outbox` loads no driver and no broker client."""

import json
import subprocess
import sys

import pytest

from outbox.cli.late_commands import LateCommands

# Each is wanted by somebody and by nobody else: who only emits must not pay for a broker's client.
DRIVERS = ["asyncpg", "psycopg", "psycopg2", "aiosqlite", "asyncmy", "aiomysql", "pymysql", "MySQLdb", "sqlite3"]
CLIENTS = [
    "aio_pika",
    "aiormq",
    "pamqp",
    "confluent_kafka",
    "aiokafka",
    "nats",
    "redis",
    "aiohttp",
    "httpx",
    "requests",
]
FACES = ["typer", "rich", "click", "starlette", "jinja2", "uvicorn"]
OTHERS = ["prometheus_client", "opentelemetry", "cloudevents", "alembic", "pytest", "hypothesis", "uvloop", "orjson"]

NOT_TO_EMIT = ["inbound.worker", "inbound.handling", "inbound.http.app", "outbound.relay", "transports.database"]
MOST_MODULES = 550  # SQLAlchemy and pydantic bring most of them; twice as many would be felt in every process


def modules_after(statement: str) -> set[str]:
    script = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(ran.stdout))


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """What a fresh interpreter has loaded after `import outbox`."""
    return modules_after("import outbox")


@pytest.mark.parametrize("name", DRIVERS + CLIENTS + FACES + OTHERS)
def test_importing_the_library_does_not_import(loaded: set[str], name: str) -> None:
    assert not {module for module in loaded if module == name or module.startswith(f"{name}.")}


def test_importing_the_library_loads_only_the_parts_that_every_process_needs(loaded: set[str]) -> None:
    ours = {module for module in loaded if module.startswith("outbox.")}
    for part in ("stores.postgresql", "stores.sqlite", "transports.memory", "testing", "cli", "dashboard"):
        assert not {module for module in ours if module.startswith(f"outbox.{part}")}


@pytest.mark.parametrize("part", NOT_TO_EMIT)
def test_importing_the_library_loads_nothing_that_only_workers_and_relays_need(loaded: set[str], part: str) -> None:
    assert f"outbox.{part}" not in loaded
    assert f"outbox.{part}" in modules_after(f"import outbox.{part}")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What an application has loaded that only emits on PostgreSQL, as far as its statements."""
    return modules_after(
        "import outbox; from sqlalchemy.dialects.postgresql import asyncpg; "
        "shop = outbox.Outbox(db_engine_url='postgresql+asyncpg://u:p@nowhere.invalid/d'); "
        "emitter = shop._parts.emitter; store = shop.store; schedule = emitter.schedule(None, None, None); "
        "message = emitter.message('order.created', {'id': 1}, None, None, None, None); "
        "statement, rows = store.writing.insert([message], schedule); "
        "print(statement.compile(dialect=asyncpg.dialect()), file=__import__('sys').stderr)"
    )


@pytest.mark.parametrize("name", [*FACES, "aiosqlite", "sqlite3", "psycopg", "aiohttp", "aiormq"])
def test_emitting_on_postgresql_does_not_import(emitted: set[str], name: str) -> None:
    assert "outbox.stores.postgresql" in emitted
    assert not {module for module in emitted if module == name or module.startswith(f"{name}.")}


@pytest.mark.parametrize("part", NOT_TO_EMIT)
def test_emitting_on_postgresql_loads_nothing_that_only_workers_and_relays_need(emitted: set[str], part: str) -> None:
    assert f"outbox.{part}" not in emitted


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_the_help_of_the_command_loads_no_command_no_driver_and_no_dialect(words: list[str]) -> None:
    loaded = modules_after(
        f"import sys; sys.argv = ['outbox', *{words}]; sys.stdout = sys.stderr\n"
        "from outbox.cli import main\ntry: main()\nexcept SystemExit: sys.stdout = sys.__stdout__\n0"
    )
    assert "outbox.cli" in loaded
    commands = {f"outbox.cli.{name.replace('-', '_')}" for name in LateCommands.SHORT_HELPS}
    assert not loaded & commands
    assert not {module for module in loaded if module.split(".")[0] in [*DRIVERS, *CLIENTS, "rich", "uvloop"]}
    assert not {module for module in loaded if module.startswith("sqlalchemy.dialects.")}


def test_the_list_of_commands_says_of_each_what_its_own_help_says() -> None:
    for name, command in LateCommands().items():
        assert command.get_short_help_str(limit=100) == LateCommands.SHORT_HELPS[name]


def test_importing_the_library_takes_a_bounded_number_of_modules(loaded: set[str]) -> None:
    assert len(loaded) < MOST_MODULES


def test_setting_up_and_making_a_message_still_connects_to_nothing() -> None:
    loaded = modules_after(
        "import outbox; outbox.setup(db_engine_url='postgresql+asyncpg://u:p@nowhere.invalid/d'); "
        "outbox.outbox.metadata; outbox.listen('order.created')(print); "
        "outbox.Message(routing_key='order.created', body=b'')"
    )
    assert not {module for module in loaded if module.split(".")[0] in DRIVERS + CLIENTS + FACES}


def test_one_database_is_not_paid_for_with_the_others_driver() -> None:
    loaded = modules_after("import outbox; outbox.Outbox(db_engine_url='sqlite://').store")
    assert "aiosqlite" in loaded
    assert not loaded & {"asyncpg", "psycopg"}


def test_the_helpers_for_tests_need_no_pytest_and_no_driver() -> None:
    loaded = modules_after("from outbox.testing import advance, drain, emitted; import outbox.testing.servers")
    assert not {module for module in loaded if module.split(".")[0] in ["pytest", "_pytest", *DRIVERS, *CLIENTS]}


@pytest.mark.parametrize("name", ["outbox", "outbox.testing", "outbox.testing.plugin"])
def test_what_starts_servers_is_loaded_by_the_test_that_wants_one(name: str) -> None:
    loaded = modules_after(f"import {name}")
    assert name in loaded
    assert not {module for module in loaded if module.startswith("outbox.testing.servers")}


@pytest.mark.parametrize(
    "statement",
    [
        "from outbox import setup, emit, message_relay, listen, Listener, worker, Reject, tracking, get_tracking_ids",
        "import outbox.sqlite; outbox.sqlite.prepare",
        "from outbox import outbox, Outbox; assert isinstance(outbox, Outbox)",
        "from outbox import *; emit, worker",
    ],
)
def test_the_documented_imports_work_in_a_fresh_interpreter(statement: str) -> None:
    assert "outbox" in modules_after(statement)
