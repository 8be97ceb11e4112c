"""Selection: a plugin of pytest that keeps the tests which belong to one server or database.

`-p tests.matrix.selection --belongs postgresql` keeps the tests that speak to PostgreSQL.
"""

from __future__ import annotations

import re

import pytest

# The words in a test's name and fixtures that tell, and the servers that its module starts for itself.
_WORDS = {
    "postgresql": ("postgresql", "asyncpg", "psycopg", "pgbouncer"),
    "mysql": ("mariadb", "mysql", "asyncmy"),
    "rabbitmq": ("rabbitmq", "vhost", "aio-pika", "aio_pika", "amqp"),
    "sqlite": ("sqlite",),
}
_STARTED = {"postgresql": "PostgreSQL", "mysql": "MariaDB", "rabbitmq": "RabbitMQ"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--belongs", choices=[*_WORDS, "all"], default="all", help="keep the tests that belong to it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted: str = config.getoption("--belongs")
    if wanted == "all":
        return
    left_out = [item for item in items if not belongs(item, wanted)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if belongs(item, wanted)]


def belongs(item: pytest.Item, wanted: str) -> bool:
    """Whether a test speaks to it: by its parameters, if they name any of these, else by its fixtures and its name."""
    parameters = item.name.partition("[")[2]
    named = {subject for subject, words in _WORDS.items() if _speaks(parameters, words)}
    if named & {"postgresql", "mysql", "sqlite"} and wanted != "rabbitmq":
        return wanted in named
    fixtures = " ".join(getattr(item, "fixturenames", ()))
    if _speaks(f"{item.nodeid} {fixtures}", _WORDS[wanted]):
        return True
    started = _STARTED.get(wanted)
    return bool(started) and bool(re.search(rf"\b{started}\(", item.path.read_text()))


def _speaks(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text.lower() for word in words)
