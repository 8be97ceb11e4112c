"""`outbox topology`: what it prints is enough for everything to run under users that may make nothing."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiormq
import pytest

from outbox import Listener, adapters, listen
from outbox.cli.exits import ExitCode
from outbox.settings import Settings
from outbox.testing.servers import RabbitMQ, Server
from outbox.transports.rabbitmq.declaring import declare_for
from outbox.transports.rabbitmq.provisioning import permissions, terraform
from outbox.transports.rabbitmq.topology import STEPS, Names, Topology
from tests.support.amqp import OFFERED_BEFORE, arrival, channel_to, connected, declare_at
from tests.support.broker import VirtualHost
from tests.support.commands import Command

from .terraform import resources

SHOP = """
from outbox import listen

@listen("order.*", queue="billing", retry_delays=(0.1, 5))
def on_order(order): ...

@listen("order.created", queue="shipping")
def on_created(order): ...

@listen("order.#", queue="audit", retry_delays=lambda attempt_count, error: attempt_count)
def on_any(order): ...

two = [on_order, on_created]
three = [*two, on_any]
one = on_order
"""
DEFAULT = Settings.of({}, {}).policy("retry_delays")
VERSION = ("--server-version", "3.10.8")


@listen("order.*", queue="billing", retry_delays=(0.1, 5))
def on_order(order: object) -> None: ...


@listen("order.created", queue="shipping")
def on_created(order: object) -> None: ...


TWO = [on_order, on_created]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command beside a module of listeners; no database is set up, and no broker."""
    (tmp_path / "shop_of_topology.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_of_topology", raising=False)
    return Command(tmp_path)


def needed(listeners: Sequence[Listener] = TWO, **options: Any) -> Topology:
    return Topology.of(Names(), listeners, DEFAULT.known_delays() or (), **options)


# What is printed.


async def test_the_table_names_everything(shop: Command) -> None:
    ran = await shop.run("topology", "shop_of_topology:two", *VERSION)
    assert ran.code == 0, ran.said
    topology = needed()
    rows = [line.split() for line in ran.stdout.splitlines()]
    for exchange in topology.exchanges:
        assert [exchange.name, exchange.kind] in rows
    assert ["outbox.topology_v1", "direct"] in rows
    for queue in topology.queues:
        arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in queue.arguments.items())
        assert [queue.name, *arguments.split()] in rows
    for binding in topology.bindings:
        assert [binding.exchange, binding.routing_key or "-", binding.queue] in rows
    assert ["relay", "^$", "^outbox$", "^$"] in rows
    trials, write = r"outbox\.trial_.*", r"^outbox\.(delay_.*|dlx|trial_.*)$"
    assert ["worker", f"^{trials}$", write, rf"^(billing|shipping|outbox\.dlx|{trials})$"] in rows


async def test_names_and_delays_come_from_the_settings(shop: Command) -> None:
    settings = {"OUTBOX_EXCHANGE_NAME": "shop", "OUTBOX_QUEUE_PREFIX": "eu.", "OUTBOX_RETRY_DELAYS": "7"}
    ran = await shop.run("topology", "shop_of_topology:two", "--format", "json", *VERSION, **settings)
    assert {each["name"] for each in ran.document["queues"]} == {
        *("eu.billing", "eu.billing.dlq", "eu.shipping", "eu.shipping.dlq"),
        *("shop.delay_100ms", "shop.delay_5s", "shop.delay_7s"),
    }


@pytest.mark.parametrize(
    ("url", "options", "vhost"),
    [
        ("", [], "/"),
        ("amqp://somewhere/", [], "/"),
        ("amqp://somewhere", [], "/"),
        ("amqps://user:secret@somewhere/%2Fshop", [], "/shop"),
        ("amqp://somewhere/shop?name=x", [], "shop"),
        ("amqp://somewhere/shop", ["--vhost", "other"], "other"),
        ("memory://shop", [], "/"),
    ],
)
async def test_the_virtual_host_is_that_of_the_url_unless_another_is_named(
    shop: Command, url: str, options: list[str], vhost: str
) -> None:
    arguments = ("--format", "json", *VERSION, *options)
    ran = await shop.run("topology", "shop_of_topology:two", *arguments, OUTBOX_TRANSPORT=url)
    found = ran.document
    assert {each["vhost"] for part in ("exchanges", "queues", "bindings") for each in found[part]} == {vhost}


async def test_a_server_that_limits_deliveries_is_told_not_to(shop: Command) -> None:
    ran = await shop.run("topology", "shop_of_topology:two", "--format", "json", "--server-version", "4.1.2")
    limits = {each["name"]: each["arguments"].get("x-delivery-limit") for each in ran.document["queues"]}
    assert limits["billing"] == limits["billing.dlq"] == -1


@pytest.mark.parametrize("transport", ["", "memory://shop"])
async def test_without_a_version_and_without_a_broker_nothing_is_printed(shop: Command, transport: str) -> None:
    ran = await shop.run("topology", "shop_of_topology:two", "--format", "json", OUTBOX_TRANSPORT=transport)
    assert (ran.code, ran.stdout, ran.error_lines) == (ExitCode.USAGE, "", 1)
    assert "--server-version" in ran.stderr and "21 lost connections" in ran.stderr


async def test_without_a_version_the_configured_broker_is_asked(shop: Command, vhost: VirtualHost) -> None:
    ran = await shop.run("topology", "shop_of_topology:two", "--format", "json", OUTBOX_TRANSPORT=vhost.url)
    limits = {each["name"]: each["arguments"].get("x-delivery-limit") for each in ran.document["queues"]}
    assert limits["billing"] == (-1 if vhost.server_version >= (4,) else None)
    assert not vhost.queues() and not vhost.exchanges(), "nothing is made"


async def test_a_broker_that_is_away_is_not_guessed(shop: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"amqp://shop:s3cret@127.0.0.1:{closed.getsockname()[1]}/"
        ran = await shop.run("topology", "shop_of_topology:two", OUTBOX_TRANSPORT=url)
    assert (ran.code, ran.stdout, ran.error_lines) == (ExitCode.UNREACHABLE, "", 1)
    assert "with --server-version it need not be asked" in ran.stderr
    assert "s3cret" not in ran.stderr


async def test_every_step_is_there_for_delays_that_a_function_decides(shop: Command) -> None:
    ran = await shop.run("topology", "shop_of_topology:three", "--format", "json", *VERSION)
    assert {Names().delay(step) for step in STEPS} <= {each["name"] for each in ran.document["queues"]}


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["shop_of_topology:two", "--server-version", "new"], ExitCode.USAGE, "such as 4.1"),
        (["shop_of_topology:two", "--format", "yaml"], ExitCode.USAGE, "terraform"),
        (["shop_of_topology"], ExitCode.USAGE, "MODULE:ATTRIBUTE"),
        (["shop_of_topology:none"], ExitCode.CONFIGURATION, "no attribute"),
    ],
)
async def test_what_cannot_be_printed_is_told_in_a_line(
    shop: Command, arguments: list[str], code: ExitCode, told: str
) -> None:
    ran = await shop.run("topology", *arguments)
    assert (ran.code, ran.stdout) == (code, "")
    assert told in ran.stderr


async def test_without_rabbitmqs_client_the_command_says_how_to_get_it(
    shop: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_loaded", {})
    for name in [each for each in sys.modules if each.startswith("outbox.transports.rabbitmq")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aio_pika", None)  # as if it could not be imported
    ran = await shop.run("topology", "shop_of_topology:two", *VERSION)
    assert (ran.code, ran.error_lines) == (ExitCode.CONFIGURATION, 1)
    assert "pip install 'transactional-outbox[rabbitmq]'" in ran.stderr


# Terraform.


async def test_terraform_makes_what_the_listeners_need_and_the_marker_last(shop: Command) -> None:
    arguments = (*VERSION, "--relay-user", "mover", "--worker-user", "doer", "--vhost", "shop")
    ran = await shop.run("topology", "shop_of_topology:two", "--format", "terraform", *arguments)
    topology, found = needed(), resources(ran.stdout)
    exchanges = [each.values for each in found if each.kind == "rabbitmq_exchange"]
    assert exchanges == [
        {"name": each.name, "vhost": "shop", "settings": {"type": each.kind, "durable": True}}
        for each in (*topology.exchanges, topology.marker)
        if each is not None
    ]
    queues = [each.values for each in found if each.kind == "rabbitmq_queue"]
    assert [(each["name"], each["vhost"], each["settings"]["durable"]) for each in queues] == [
        (queue.name, "shop", True) for queue in topology.queues
    ]
    assert [json.loads(each["settings"]["arguments_json"]) for each in queues] == [
        queue.arguments for queue in topology.queues
    ]
    bindings = [each.values for each in found if each.kind == "rabbitmq_binding"]
    assert bindings == [
        {
            "source": each.exchange,
            "vhost": "shop",
            "destination": each.queue,
            "destination_type": "queue",
            "routing_key": each.routing_key,
        }
        for each in topology.bindings
    ]
    granted = {each.values["user"]: each.values["permissions"] for each in found if each.kind == "rabbitmq_permissions"}
    relay, worker = permissions(topology)
    assert granted == {
        "mover": {"configure": "^$", "write": relay.write, "read": relay.read},
        "doer": {"configure": worker.configure, "write": worker.write, "read": worker.read},
    }
    assert len(found) == len(exchanges) + len(queues) + len(bindings) + len(granted)
    after = {(each.kind, each.label): each.depends_on for each in found}
    assert after["rabbitmq_exchange", "outbox_topology"] == ["rabbitmq_binding.outbox"]
    assert after["rabbitmq_binding", "outbox"] == ["rabbitmq_exchange.outbox", "rabbitmq_queue.outbox"]
    assert after["rabbitmq_queue", "outbox"] == ["rabbitmq_exchange.outbox"]


def test_names_that_mean_something_to_terraform_are_quoted() -> None:
    name = 'a "quoted" ${template} %{too} \\ ä'
    listener = Listener(name, print, queue="billing")  # other names at the broker have plain characters only
    topology = Topology.of(Names("9 lives"), [listener], [timedelta(seconds=1)])
    found = resources(terraform(topology, name, {"worker": name}))
    assert {each.label for each in found} == {"_9_lives", "_9_lives_topology", "_9_lives_worker"}
    assert name in {each.values["routing_key"] for each in found if each.kind == "rabbitmq_binding"}
    assert {each.values["vhost"] for each in found} == {name}


# What is printed, imported.


@pytest.fixture
async def provisioned(shop: Command, rabbitmq: Server, vhost: VirtualHost) -> Any:
    """Definitions from the command, imported by an administrator."""
    arguments = ("--format", "json", "--vhost", vhost.name)
    ran = await shop.run("topology", "shop_of_topology:two", *arguments, OUTBOX_TRANSPORT=vhost.url)
    if isinstance(rabbitmq, RabbitMQ):
        file = rabbitmq.folder / f"{vhost.name}.json"
        file.write_text(ran.stdout)
        file.chmod(0o644)
        rabbitmq.control("import_definitions", str(file))
    else:
        vhost.management.ask("POST", "definitions", **ran.document)
    return ran.document


async def test_imported_definitions_are_what_a_worker_would_declare(vhost: VirtualHost, provisioned: Any) -> None:
    imported = vhost.exchanges().keys(), {name: each["arguments"] for name, each in vhost.queues().items()}
    bound = {(each["source"], each["destination"], each["routing_key"]) for each in vhost.bindings()}
    declared = await declare_at(vhost.url, needed(server_version=vhost.server_version))
    assert not declared.weaker
    assert imported == (vhost.exchanges().keys(), {name: each["arguments"] for name, each in vhost.queues().items()})
    assert bound == {(each["source"], each["destination"], each["routing_key"]) for each in vhost.bindings()}


@pytest.mark.parametrize("kind", ["least", "offered before"])
async def test_the_whole_flow_runs_on_imported_definitions_under_users_that_may_make_nothing(
    vhost: VirtualHost, provisioned: Any, kind: str
) -> None:
    relay, worker = permissions(needed())
    if kind == "least":
        relaying = vhost.url_of_user(configure=relay.configure, write=relay.write, read=relay.read)
        working = vhost.url_of_user(configure=worker.configure, write=worker.write, read=worker.read)
    else:
        relaying = working = vhost.url_of_user(**OFFERED_BEFORE)
    await declare_at(relaying, Topology.of_relay(Names()))
    async with connected(working) as open_channel:
        topology, declared = await declare_for(open_channel, Names(), TWO, DEFAULT, server_version=vhost.server_version)
    assert declared.configures is False
    assert declared.dead_letters is (kind == "least")

    async with channel_to(relaying) as relay_channel, channel_to(working) as worker_channel:
        for channel in (relay_channel, worker_channel):
            await channel.confirm_delivery()
        await relay_channel.basic_publish(b"1", exchange="outbox", routing_key="order.changed", mandatory=True)
        assert await arrival(worker_channel, "billing") == b"1"
        delay = Names().delay(timedelta(seconds=0.1))
        assert delay in topology.delays
        await worker_channel.basic_publish(b"1 again", exchange=delay, routing_key="billing", mandatory=True)
        assert await arrival(worker_channel, "billing") == b"1 again"
        if declared.dead_letters:
            await worker_channel.basic_publish(b"dead", exchange="outbox.dlx", routing_key="billing", mandatory=True)
            async with channel_to(vhost.url) as looking:
                assert await arrival(looking, "billing.dlq") == b"dead"


async def test_the_least_permissions_allow_nothing_beyond_them(vhost: VirtualHost, provisioned: Any) -> None:
    relay, worker = permissions(needed())
    relaying = vhost.url_of_user(configure=relay.configure, write=relay.write, read=relay.read)
    working = vhost.url_of_user(configure=worker.configure, write=worker.write, read=worker.read)
    for url, attempt in [
        (relaying, lambda channel: channel.queue_declare("new")),
        (relaying, lambda channel: channel.basic_get("billing")),
        (relaying, lambda channel: channel.queue_delete("billing")),
        (working, lambda channel: channel.exchange_declare("new")),
        (working, lambda channel: channel.queue_purge("billing.dlq")),
        (working, lambda channel: channel.basic_get("outbox.delay_5s")),
        (working, lambda channel: channel.queue_bind("billing", "outbox", "#")),
    ]:
        async with channel_to(url) as channel:
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await attempt(channel)


async def test_permissions_of_users_that_exist_are_imported_too(
    shop: Command, vhost: VirtualHost, provisioned: Any
) -> None:
    user = vhost.url_of_user().split("://")[1].split(":")[0]
    arguments = ("--format", "json", "--vhost", vhost.name, "--worker-user", user)
    ran = await shop.run("topology", "shop_of_topology:two", *arguments, OUTBOX_TRANSPORT=vhost.url)
    vhost.management.ask("POST", "definitions", **ran.document)
    granted = vhost.management.ask("GET", "permissions", vhost.name, user)
    _, worker = permissions(needed())
    assert (granted["configure"], granted["write"], granted["read"]) == (worker.configure, worker.write, worker.read)
