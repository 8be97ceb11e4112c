"""A listener with another binding key than before: what its queue still gets is told, and goes when that is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from outbox import Binding, ConfigurationError, Listener, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.events import Advised, Unbound
from outbox.testing.servers import RabbitMQ
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.management import management_url_of
from tests.support.broker import VirtualHost
from tests.support.commands import Command, until
from tests.support.databases import on_sqlite
from tests.support.outboxes import MakeOutbox

from .strategies import Watch

pytestmark = on_sqlite

MODULE = """
from outbox import listen

@listen("order.created", queue="billing")
async def bill(order): ...
"""


async def bill(order: Any) -> None: ...


BEFORE, AFTER = (Listener(key, bill, queue="billing") for key in ("order.*", "order.created"))


@dataclass
class Place:
    """A transport: what to set up, and what its queue is bound to."""

    options: dict[str, Any] = field(default_factory=dict)
    vhost: VirtualHost | None = None

    @property
    def settings(self) -> dict[str, str]:
        return {f"OUTBOX_{name.upper()}": value for name, value in self.options.items()}

    async def keys(self, outbox: Outbox) -> set[str]:
        if self.vhost is None:
            return {binding.binding_key for binding in await outbox.bindings()}
        found = self.vhost.bindings()
        return {
            each["routing_key"] for each in found if each["source"] == "outbox" and each["destination"] == "billing"
        }


@pytest.fixture(params=["database", "rabbitmq", "rabbitmq without management"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "database":
        return Place()
    vhost: VirtualHost = request.getfixturevalue("vhost")
    if request.param == "rabbitmq without management":
        return Place({"transport": vhost.url}, vhost)
    server = vhost.management.server
    management_url = server.management_url if isinstance(server, RabbitMQ) else management_url_of(server.url)
    return Place({"transport": vhost.url, "rabbitmq_management_url": management_url}, vhost)


@pytest.fixture
def shop_command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command where a module has the listener of today."""
    (tmp_path / "shop_of_rebinding.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield command
    sys.modules.pop("shop_of_rebinding", None)


@pytest.fixture
def shop(shop_command: Command, place: Place) -> Command:
    """The same, with the settings of a transport."""
    shop_command.settings |= place.settings
    return shop_command


async def serve(outbox: Outbox, listener: Listener) -> None:
    """Start a worker, and stop it."""
    async with outbox.running(listeners=[listener]):
        pass


async def test_a_changed_binding_key_is_told_at_the_start_and_by_doctor(
    make_outbox: MakeOutbox, watch: Watch, shop: Command, place: Place
) -> None:
    outbox = make_outbox(observers=[watch], **place.options)
    await serve(outbox, BEFORE)
    assert watch.of(Advised) == []
    await serve(outbox, AFTER)
    [advised] = watch.of(Advised)
    assert advised.where == "the queue 'billing'"
    assert "still gets order.*, and its listener asks for order.created only" in advised.advice
    assert "outbox queues rebind" in advised.advice
    assert await place.keys(outbox) == {"order.*", "order.created"}
    found = (await shop.run("doctor", "shop_of_rebinding:bill", "--json")).document["findings"]
    [finding] = [each for each in found if each["subject"] == "bindings" and each["level"] == "warning"]
    assert "order.*" in finding["what"] and "outbox queues rebind" in finding["advice"]


async def test_the_command_lets_the_listeners_replace_what_was_bound(
    make_outbox: MakeOutbox, shop: Command, place: Place
) -> None:
    outbox = make_outbox(**place.options)
    await serve(outbox, BEFORE)
    ran = await shop.run("queues", "rebind", "shop_of_rebinding:bill")
    assert (ran.code, ran.stdout) == (0, "billing gets order.created, and no more order.*\n")
    assert await place.keys(outbox) == {"order.created"}
    again = await shop.run("queues", "rebind", "shop_of_rebinding:bill", "--json")
    assert again.document == {"queues": [{"queue": "billing", "binding_key": "order.created", "removed": []}]}


async def test_with_the_setting_a_worker_that_starts_replaces_what_was_bound(
    make_outbox: MakeOutbox, watch: Watch, place: Place
) -> None:
    outbox = make_outbox(observers=[watch], rebind_queues=True, **place.options)
    await serve(outbox, BEFORE)
    await serve(outbox, AFTER)
    assert watch.of(Advised) == []
    assert [event.binding for event in watch.of(Unbound)] == [Binding("billing", "order.*")]
    assert await place.keys(outbox) == {"order.created"}


async def test_with_the_setting_a_relay_replaces_the_keys_of_its_routes(make_outbox: MakeOutbox, watch: Watch) -> None:
    async def publish(message: Message) -> None: ...

    for key in ("order.*", "order.created"):
        outbox = make_outbox(routes={key: publish}, rebind_queues=True, observers=[watch])
        async with outbox.running(relay=True):
            pass
    [unbound] = watch.of(Unbound)
    assert unbound.binding.binding_key == "order.*"
    assert [binding.binding_key for binding in await outbox.bindings()] == ["order.created"]


async def test_on_rabbitmq_the_setting_needs_the_management_interface_or_a_database(make_outbox: MakeOutbox) -> None:
    with pytest.raises(ConfigurationError, match="rebind_queues=True needs rabbitmq_management_url, or a database"):
        Outbox(transport="amqp://guest@localhost", rebind_queues=True)
    make_outbox(transport="amqp://guest@localhost", rebind_queues=True)


async def test_what_is_bound_at_a_broker_is_recorded_where_no_router_follows_it(
    make_outbox: MakeOutbox, watch: Watch, command: Command, vhost: VirtualHost
) -> None:
    here = make_outbox(transport=vhost.url, queue_prefix="eu.")
    await serve(here, BEFORE)
    await serve(make_outbox(transport=vhost.url, queue_prefix="us.", observers=[watch]), AFTER)
    assert watch.of(Advised) == [], "the queue of another prefix is another queue"
    assert await here.store.owners.declared() == [
        Binding("eu.billing", "order.*"),
        Binding("us.billing", "order.created"),
    ]
    assert set(await here.store.owners.all()) == {"", "eu.billing", "us.billing"}
    assert (await command.run("tables", "switch-transport", "database")).code == 0
    moved = make_outbox()
    assert await moved.bindings() == []
    async with moved.running(relay=True):
        async with moved.transaction() as session:
            await moved.emit(session, "order.created", {})

        async def is_unroutable() -> bool:
            return (await moved.backlog()).unroutable == 1

        await until(is_unroutable)


@pytest.mark.parametrize("kind", ["connection", "transport"])
async def test_a_worker_whose_setting_can_remove_nothing_says_so(
    make_outbox: MakeOutbox, watch: Watch, rabbitmq_url: str, kind: str
) -> None:
    connection = await aio_pika.connect(rabbitmq_url)
    given = {"rmq_connection": connection} if kind == "connection" else {"transport": RabbitmqTransport(rabbitmq_url)}
    try:
        outbox = make_outbox(db_engine_url=None, observers=[watch], rebind_queues=True, **given)
        await serve(outbox, AFTER)
    finally:
        await connection.close()
    [advised] = watch.of(Advised)
    assert advised.where == "bindings"
    assert "rebind_queues=True removes nothing" in advised.advice and "rabbitmq_management_url" in advised.advice


async def test_without_the_interface_the_doctor_says_whether_bindings_were_looked_at(
    make_outbox: MakeOutbox, shop_command: Command, vhost: VirtualHost
) -> None:
    nowhere = {"OUTBOX_TRANSPORT": vhost.url, "OUTBOX_RABBITMQ_MANAGEMENT_URL": "http://127.0.0.1:1"}
    await serve(make_outbox(transport=vhost.url), AFTER)
    with_database, without = (
        {"OUTBOX_DB_ENGINE_URL": url} for url in (shop_command.settings["OUTBOX_DB_ENGINE_URL"], "")
    )
    for database, expected in ((with_database, {"bindings": "ok"}), (without, {"management": "warning"})):
        ran = await shop_command.run("doctor", "shop_of_rebinding:bill", "--json", **nowhere, **database)
        levels = {each["subject"]: each["level"] for each in ran.document["findings"]}
        assert {"management": "ok", **expected}.items() <= levels.items()
        assert ("bindings" in levels) == ("bindings" in expected)


async def test_an_interface_that_is_away_keeps_no_worker_from_starting(
    make_outbox: MakeOutbox, watch: Watch, rabbitmq_url: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"rabbitmq_management_url": "http://127.0.0.1:1"}
    outbox = make_outbox(transport=rabbitmq_url, observers=[watch], **nowhere)
    await serve(outbox, BEFORE)
    [advised] = watch.of(Advised)
    assert "does not tell what queues are bound to" in advised.advice
    (command.folder / "shop_of_rebinding.py").write_text(MODULE)
    command.settings |= {"OUTBOX_TRANSPORT": rabbitmq_url, "OUTBOX_RABBITMQ_MANAGEMENT_URL": "http://127.0.0.1:1"}
    monkeypatch.syspath_prepend(command.folder)
    ran = await command.run("queues", "rebind", "shop_of_rebinding:bill")
    assert (ran.code, ran.error_lines) == (ExitCode.CONFIGURATION, 1)
