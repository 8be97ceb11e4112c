"""Adapters: which store serves a database, which transport a URL, and how third parties add theirs."""

import asyncio
import re
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points, metadata
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from outbox import ConfigurationError, Message, Outbox, OutboxError, adapters
from outbox.adapters import _installation, async_url, parse_url, store_class, sync_url, transport_for
from outbox.core.transport import Published
from outbox.stores.postgresql import PostgresqlStore
from outbox.stores.sqlite import SqliteStore
from outbox.transports.function import FunctionTransport
from outbox.transports.memory import MemoryTransport

Missing = Callable[..., None]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Missing:
    """Make modules impossible to import, as if they were not installed."""

    def block(*names: str) -> None:
        for name in names:
            for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                monkeypatch.delitem(sys.modules, loaded)
            monkeypatch.setitem(sys.modules, name, None)

    return block


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_loaded", {})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a distribution called `acme` for the length of a test."""

    def install(entry_points: str, source: str) -> None:
        (tmp_path / "acme_outbox.py").write_text(textwrap.dedent(source))
        about = tmp_path / "acme-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_outbox", raising=False)

    return install


def test_what_was_found_once_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    monkeypatch.setattr(adapters, "entry_points", lambda group: looks.append(group) or entry_points(group=group))
    assert adapters.store_class("sqlite") is adapters.store_class("sqlite")
    assert looks == [adapters.STORES], "a look takes milliseconds"


# Databases.


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite://", "sqlite+aiosqlite"),
        ("sqlite:///orders.db", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:///orders.db", "sqlite+aiosqlite"),
        ("sqlite+pysqlite:///orders.db", "sqlite+aiosqlite"),
        ("postgresql://u:p@h/d", "postgresql+asyncpg"),
        ("postgres://u:p@h/d", "postgresql+asyncpg"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+asyncpg"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://u:p@h/d", "postgresql+asyncpg"),
    ],
)
def test_a_url_gets_a_driver_that_works_with_an_event_loop(url: str, driver: str) -> None:
    found = async_url(url)
    assert found.drivername == driver
    asked = make_url(url.replace("postgres:", "postgresql:"))
    assert (found.username, found.password, found.host, found.database) == (
        asked.username,
        asked.password,
        asked.host,
        asked.database,
    )


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite+aiosqlite:///orders.db", "sqlite+pysqlite"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg"),
    ],
)
def test_a_listener_in_a_thread_gets_a_driver_that_works_there(url: str, driver: str) -> None:
    assert sync_url(make_url(url)).drivername == driver


def test_what_follows_the_database_in_a_url_is_kept() -> None:
    assert async_url("postgresql://h/d?sslmode=require&x=1").query == {"sslmode": "require", "x": "1"}


def test_the_next_best_driver_is_taken_where_the_best_is_missing(missing: Missing) -> None:
    missing("asyncpg")
    assert async_url("postgresql://h/d").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    ("url", "absent"),
    [
        pytest.param("postgresql://h/d", ("asyncpg", "psycopg"), id="PostgreSQL, any driver"),
        pytest.param("postgresql+asyncpg://h/d", ("asyncpg", "psycopg"), id="PostgreSQL, asyncpg, nothing there"),
        pytest.param("postgresql+asyncpg://h/d", ("asyncpg",), id="PostgreSQL, asyncpg"),
        pytest.param("postgresql+psycopg://h/d", ("psycopg",), id="PostgreSQL, psycopg"),
        pytest.param("sqlite:///orders.db", ("aiosqlite",), id="SQLite"),
    ],
)
def test_a_missing_driver_is_named_with_an_installation_that_exists(
    missing: Missing, url: str, absent: tuple[str, ...]
) -> None:
    missing(*absent)
    with pytest.raises(ConfigurationError, match=rf"{absent[0]}.*pip install '?[a-z-]+") as caught:
        Outbox(db_engine_url=url).store  # noqa: B018 - asking is enough
    extras = metadata("transactional-outbox").get_all("Provides-Extra")
    assert set(re.findall(r"transactional-outbox\[(\w+)\]", str(caught.value))) <= set(extras or ())


def test_one_driver_is_not_one_of_several(missing: Missing) -> None:
    missing("asyncpg")
    with pytest.raises(ConfigurationError, match="no driver for postgresql is installed: asyncpg is needed"):
        async_url("postgresql+asyncpg://h/d")


def test_a_driver_that_cannot_be_used_is_named_where_no_other_is_installed(missing: Missing) -> None:
    missing("asyncpg", "psycopg")
    with pytest.raises(ConfigurationError, match="psycopg2 cannot be used here, and no other driver for postgresql is"):
        async_url("postgresql+psycopg2://h/d")


@pytest.mark.parametrize("module", ["aio_pika", "aiormq.abc", "pamqp"])
def test_a_missing_broker_client_is_named_with_the_extra_that_brings_it(module: str) -> None:
    assert _installation(module) == "; run: pip install 'transactional-outbox[rabbitmq]'"


def test_a_missing_driver_for_threads_is_named_as_well(missing: Missing) -> None:
    missing("psycopg", "psycopg2")
    with pytest.raises(ConfigurationError, match=r"transactional-outbox\[psycopg\]"):
        sync_url(make_url("postgresql+asyncpg://h/d"))


@pytest.mark.parametrize("url", ["oracle://h/d", "mssql+pyodbc://h/d", "x://"])
def test_a_database_without_a_store_is_refused_with_those_there_are(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no store for the database '(\w+)'.*postgresql, sqlite"):
        async_url(url)


@pytest.mark.parametrize(
    "text",
    ["", "orders.db", "postgresql", "//h/d", "://h/d", "postgresql:h", "postgresql://h:port/d", "postgresql://[::1/d"],
)
def test_what_is_no_url_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"postgresql\+asyncpg://"):
        parse_url(text)


def test_the_store_is_chosen_by_the_dialect() -> None:
    assert store_class("sqlite") is SqliteStore
    assert store_class("postgresql") is PostgresqlStore


# Transports.


async def publish(message: Message) -> None: ...


class Publisher:
    async def __call__(self, message: Message) -> None: ...

    async def publish_one(self, message: Message) -> None: ...


def test_no_transport_means_the_database() -> None:
    assert Outbox(db_engine_url="sqlite://").transport.name == "database"
    assert Outbox(db_engine_url="sqlite://", transport="database").transport.name == "database"


@pytest.mark.parametrize("url", ["memory://", "memory:", "memory"])
def test_a_transport_is_chosen_by_the_scheme(url: str) -> None:
    assert isinstance(transport_for(url), MemoryTransport)


def test_a_transport_is_taken_as_it_is() -> None:
    transport = MemoryTransport()
    assert Outbox(transport=transport).transport is transport


@pytest.mark.parametrize("function", [publish, Publisher(), Publisher().publish_one])
def test_an_async_function_is_a_transport(function: Any) -> None:
    assert isinstance(transport_for(function), FunctionTransport)


async def test_a_function_that_raises_has_not_sent() -> None:
    async def flaky(message: Message) -> None:
        if message.body == b"bad":
            raise OSError("away")

    good, bad = Message(routing_key="a", body=b"good"), Message(routing_key="a", body=b"bad")
    published = await transport_for(flaky).publish([good, bad])
    assert published.confirmed == {good.id}
    assert published.refused[bad.id].error == "OSError: away"
    assert not published.refused[bad.id].permanent


async def test_a_function_whose_client_dies_leaves_the_message_in_doubt() -> None:
    async def dying(message: Message) -> None:
        raise asyncio.CancelledError

    assert await transport_for(dying).publish([Message(routing_key="a", body=b"")]) == Published()


@pytest.mark.parametrize(
    "value", [None, 5, print, lambda message: None, object(), [publish], {"url": "memory://"}, b"memory://"]
)
def test_what_is_no_transport_is_refused_with_the_ways_to_give_one(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a URL, a Transport, or `async def publish"):
        transport_for(value)


class Lookalike:
    """What is a transport by its methods alone."""

    name = "lookalike"

    async def publish(self, messages: Any) -> Published:
        return Published()

    def consume(self, listener: Any, prefetch: int) -> Any: ...


def test_what_only_looks_like_a_transport_is_told_to_inherit() -> None:
    with pytest.raises(ConfigurationError, match=r"Lookalike: .*let it inherit outbox\.extend\.Transport"):
        transport_for(Lookalike())


@pytest.mark.parametrize("url", ["", "kafka://h", "memoryx://", "MEMORY", "://", "no such thing"])
def test_an_unknown_scheme_is_refused_with_those_there_are(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there are: .*memory"):
        transport_for(url)


@pytest.mark.parametrize("text", ["/events", "events", "whsec_c2VjcmV0", ""])
def test_what_is_no_url_of_a_transport_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^no URL: write for example https://…; there are: .*https") as caught:
        transport_for(text)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("https://shop.example/hook", "aiohttp", "http"), ("amqp://broker", "aio_pika", "rabbitmq")],
)
def test_a_client_that_is_missing_is_named_with_the_extra_that_brings_it(
    missing: Missing, monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    missing(module)
    for name in [name for name in sys.modules if name.startswith(f"outbox.transports.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigurationError, match=rf"{module}.*run: pip install 'transactional-outbox\[{extra}\]'"):
        transport_for(url)


# Third parties.


def test_a_third_party_adds_a_transport_by_an_entry_point(installed: Callable[[str, str], None]) -> None:
    installed(
        """
        [outbox.transports]
        acme = acme_outbox:make
        """,
        """
        from outbox.transports.memory import MemoryTransport

        class AcmeTransport(MemoryTransport):
            name = "acme"

        def make(url, defaults):
            transport = AcmeTransport()
            transport.url = f"{url}, {defaults.settings['exchange_name']}"
            return transport
        """,
    )
    transport: Any = Outbox(transport="acme://broker/1", exchange_name="shop").transport
    assert (transport.name, transport.url) == ("acme", "acme://broker/1, shop")


def test_a_third_party_adds_a_store_by_an_entry_point(installed: Callable[[str, str], None]) -> None:
    installed(
        """
        [outbox.stores]
        acmedb = acme_outbox:AcmeStore
        """,
        """
        from outbox.stores.sqlite import SqliteStore

        class AcmeStore(SqliteStore):
            async_drivers = ("aiosqlite",)
        """,
    )
    assert store_class("acmedb").__name__ == "AcmeStore"  # type: ignore[attr-defined]
    assert async_url("acmedb://h/d").drivername == "acmedb+aiosqlite"


async def test_a_store_whose_dialect_sqlalchemy_does_not_know_says_what_is_missing(
    installed: Callable[[str, str], None],
) -> None:
    installed(
        "[outbox.stores]\nacmedb = acme_outbox:AcmeStore\n", "from outbox.stores.sqlite import SqliteStore as AcmeStore"
    )
    with pytest.raises(
        ConfigurationError, match=r"SQLAlchemy has no dialect acmedb\+aiosqlite: .*sqlalchemy\.dialects"
    ):
        await Outbox(db_engine_url="acmedb+aiosqlite:///h").create_tables()


def test_a_third_party_whose_client_is_missing_is_named(installed: Callable[[str, str], None]) -> None:
    installed(
        """
        [outbox.transports]
        acme = acme_outbox:make
        """,
        "import acme_client_that_is_not_installed",
    )
    with pytest.raises(OutboxError, match=r"acme_client_that_is_not_installed"):
        transport_for("acme://broker")
