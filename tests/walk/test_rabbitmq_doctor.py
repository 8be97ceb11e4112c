"""`outbox doctor` on RabbitMQ: what it finds at the broker, with the management interface and without."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox import Listener
from outbox.cli.exits import ExitCode
from outbox.testing.servers import RabbitMQ
from outbox.transports.rabbitmq.management import management_url_of
from outbox.transports.rabbitmq.topology import Names, Topology
from tests.broker import VirtualHost

from .amqp import channel_to, declare_at
from .commands import Command, until

SHOP = """
from outbox import Listener

listeners = [
    Listener("order.*", print, queue="billing", retry_delays=(1,)),
    Listener("order.created", print, queue="shipping", retry_delays=(1,)),
]
computed = [Listener("order.*", print, queue="billing", retry_delays=lambda attempt_count, error: 1)]
"""
LISTENERS = [
    Listener("order.*", print, queue="billing", retry_delays=(1,)),
    Listener("order.created", print, queue="shipping", retry_delays=(1,)),
]
NOWHERE = "http://127.0.0.1:1"
Told = tuple[str, str, str]  # level, subject, what


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vhost: VirtualHost) -> Doctor:
    (tmp_path / "shop_of_doctor.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_of_doctor", raising=False)
    return Doctor(Command(tmp_path, {"OUTBOX_TRANSPORT": vhost.url}), vhost)


class Doctor:
    """`outbox doctor`, with what it said of the broker."""

    def __init__(self, command: Command, vhost: VirtualHost) -> None:
        server = vhost.management.server
        self.command = command
        self.management_url = server.management_url if isinstance(server, RabbitMQ) else management_url_of(server.url)
        self.code = -1
        self.said = ""

    async def finds(self, listeners: str = "listeners", *, management_url: str = "", url: str = "") -> list[Told]:
        """Its findings, those of versions, drivers and the database left out."""
        named = [f"shop_of_doctor:{listeners}"] if listeners else []
        settings = {"OUTBOX_RABBITMQ_MANAGEMENT_URL": management_url or self.management_url}
        settings |= {"OUTBOX_TRANSPORT": url} if url else {}
        ran = await self.command.run("doctor", *named, "--json", **settings)
        self.code, self.said = ran.code, ran.said
        return [(each["level"], each["subject"], each["what"]) for each in ran.document["findings"]][3:]

    async def complains(self, listeners: str = "listeners", **options: str) -> list[Told]:
        """Its findings that are not fine; that nobody consumes is left out too."""
        return [each for each in await self.finds(listeners, **options) if each[0] != "ok" and each[1] != "consumers"]


async def provision(vhost: VirtualHost, listeners: Sequence[Listener] = LISTENERS) -> None:
    await declare_at(vhost.url, Topology.of(Names(), listeners, [timedelta(seconds=1)]))


async def ignore(message: object) -> None: ...


async def test_a_broker_with_all_that_listeners_need_is_fine(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        for queue in ("billing", "shipping"):
            await channel.basic_consume(queue, ignore)
        found = await doctor.finds()
    assert [(level, subject) for level, subject, _ in found] == [
        ("ok", "broker"),
        ("ok", "exchanges"),
        ("ok", "queues"),
        ("ok", "consumers"),
        ("ok", "bindings"),
        ("ok", "orphaned queues"),
    ]
    assert doctor.code == ExitCode.FINE
    assert "RabbitMQ " in found[0][2]
    assert "guest:guest" not in doctor.said


@pytest.mark.parametrize("management_url", ["", NOWHERE], ids=["management", "no management"])
async def test_everything_that_is_missing_is_named_and_nothing_is_made(
    doctor: Doctor, vhost: VirtualHost, management_url: str
) -> None:
    found = await doctor.finds(management_url=management_url)
    assert doctor.code == ExitCode.UNHEALTHY
    missing = {what for level, _, what in found if level == "error"}
    topology = Topology.of(Names(), LISTENERS, ())
    names = [each.name for each in (*topology.exchanges, *topology.queues)]
    assert missing >= {f"{name!r} is missing" for name in [*names, "outbox.topology_v1"]}
    assert vhost.exchanges() == {}
    assert vhost.queues() == {}


async def test_a_missing_binding_is_an_error_and_one_too_many_a_warning(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        await channel.queue_unbind("billing", "outbox", "order.*")
        await channel.queue_bind("billing", "outbox", "invoice.*")
    told = await doctor.complains()
    assert [(level, subject) for level, subject, _ in told] == [("error", "bindings"), ("warning", "bindings")]
    assert "'outbox' to 'billing' by 'order.*' is missing" in told[0][2]
    assert "'outbox' to 'billing' by 'invoice.*' is not what a listener asks for" in told[1][2]


@pytest.mark.parametrize("management_url", ["", NOWHERE], ids=["management", "no management"])
async def test_differing_arguments_are_named_with_management_and_without(
    doctor: Doctor, vhost: VirtualHost, management_url: str
) -> None:
    quorum, delayed = {"x-queue-type": "quorum"}, {"x-dead-letter-exchange": "outbox", "x-message-ttl": 1000}
    strong = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    arguments: dict[str, dict[str, Any]] = {
        "outbox.delay_1s": {**quorum, **delayed, **strong},
        "billing": {**quorum, "x-dead-letter-exchange": "outbox.dlx", "x-dead-letter-routing-key": "billing"},
        "shipping.dlq": {**quorum, "x-quorum-initial-group-size": 1},
    }
    async with channel_to(vhost.url) as channel:
        await channel.exchange_declare("outbox.dlx", exchange_type="topic", durable=True)
        for queue, found in arguments.items():
            await channel.queue_declare(queue, durable=True, arguments=found)
    told = await doctor.complains(management_url=management_url)
    differing = {each for each in told if " has " in each[2]}
    assert differing == {
        ("error", "exchanges", "the exchange 'outbox.dlx' has type='topic' instead of type='direct'"),
        (
            "error",
            "queues",
            "the queue 'outbox.delay_1s' has x-dead-letter-exchange='outbox' instead of x-dead-letter-exchange=''",
        ),
        (
            "warning",
            "queues",
            "the queue 'billing' has no x-dead-letter-strategy instead of x-dead-letter-strategy='at-least-once'",
        ),
        ("warning", "queues", "the queue 'billing' has no x-overflow instead of x-overflow='reject-publish'"),
    }
    assert set(vhost.queues()) == set(arguments)


async def test_a_queue_without_consumers_is_a_warning_and_with_messages_an_error(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        await channel.basic_consume("shipping", ignore)
        consumers = [each for each in await doctor.finds() if each[1] == "consumers"]
        assert consumers == [("warning", "consumers", "nobody consumes 'billing', 0 waiting")]
        assert doctor.code == ExitCode.FINE
        await channel.basic_publish(b"{}", exchange="outbox", routing_key="order.changed")

        async def is_an_error() -> bool:  # a quorum queue tells its length a few seconds later
            told = await doctor.finds()
            return ("error", "consumers", "nobody consumes 'billing', 1 waiting") in told

        await until(is_an_error)
        assert doctor.code == ExitCode.UNHEALTHY


async def test_queues_that_nobody_needs_and_nobody_consumes_are_listed(doctor: Doctor, vhost: VirtualHost) -> None:
    old = Listener("order.*", print, queue="old", retry_delays=(7,))
    await provision(vhost, [*LISTENERS, old])
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare("of somebody else")
        assert await doctor.complains() == [
            ("warning", "orphaned queues", f"none of these listeners needs {queue!r} and nobody consumes it, 0 waiting")
            for queue in ("old", "old.dlq", "outbox.delay_7s")
        ]
        await channel.basic_consume("old", ignore)
        assert await doctor.complains() == []


async def test_steps_of_a_function_are_neither_missing_nor_orphaned(doctor: Doctor, vhost: VirtualHost) -> None:
    computed = Listener("order.*", print, queue="billing", retry_delays=lambda attempt_count, error: 1)
    await provision(vhost, [computed])
    assert await doctor.complains("computed") == []
    await declare_at(vhost.url, Topology.of(Names(), [computed], (), steps=True))
    assert await doctor.complains("computed") == []


async def test_without_the_management_interface_the_rest_is_looked_at(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    found = {subject: (level, what) for level, subject, what in await doctor.finds(management_url=NOWHERE)}
    assert {subject for subject, (level, _) in found.items() if level == "ok"} >= {"broker", "exchanges", "queues"}
    level, what = found["management"]
    assert level == "ok"
    assert "bindings and orphaned queues were not looked at" in what
    assert "bindings" not in found


async def test_a_user_that_may_neither_ask_nor_declare_is_told_what_it_could_not_see(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    management_url = doctor.management_url.replace("guest:guest@", "")
    found = await doctor.finds(url=vhost.url_of_user(), management_url=management_url)
    told = {subject: what for _, subject, what in found}
    assert "no `management` tag" in told["management"]
    assert "this user may not see their arguments" in told["queues"]
    assert "secret" not in doctor.said


async def test_a_broker_that_is_away_is_an_error_and_its_password_stays_secret(doctor: Doctor) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"amqp://shop:s3cret@127.0.0.1:{closed.getsockname()[1]}/shop"
        found = await doctor.finds(url=url)
    [(level, subject, what)] = found
    assert (level, subject) == ("error", "broker")
    assert "127.0.0.1" in what
    assert "s3cret" not in doctor.said
    assert doctor.code == ExitCode.UNHEALTHY


async def test_a_password_that_is_wrong_is_an_error_that_does_not_show_it(doctor: Doctor, vhost: VirtualHost) -> None:
    url = vhost.url_of_user().replace(":secret@", ":s3cret@")
    [(level, subject, _)] = await doctor.finds(url=url)
    assert (level, subject) == ("error", "broker")
    assert "s3cret" not in doctor.said


async def test_without_listeners_the_broker_alone_is_looked_at(doctor: Doctor) -> None:
    found = await doctor.finds("")
    assert [(level, subject) for level, subject, _ in found] == [("ok", "broker"), ("ok", "exchanges and queues")]
    assert "outbox doctor MODULE:ATTRIBUTE" in found[1][2]


async def test_the_management_interface_may_be_named_by_an_option_but_its_password_may_not(doctor: Doctor) -> None:
    refused = await doctor.command.run("doctor", "--management-url", doctor.management_url)
    assert (refused.code, refused.stdout, refused.error_lines) == (ExitCode.USAGE, "", 1)
    assert "set OUTBOX_RABBITMQ_MANAGEMENT_URL instead" in refused.stderr
    without = doctor.management_url.replace("guest:guest@", "")
    ran = await doctor.command.run("doctor", "shop_of_doctor:listeners", "--json", "--management-url", without)
    assert "management" not in {each["subject"] for each in ran.document["findings"]}, "it was not reached"


async def test_an_address_that_is_no_url_is_refused(doctor: Doctor) -> None:
    ran = await doctor.command.run("doctor", "shop_of_doctor:listeners", "--management-url", "file:///etc/passwd")
    assert (ran.code, ran.error_lines) == (ExitCode.CONFIGURATION, 1)


@pytest.mark.parametrize(
    ("broker", "management"),
    [
        ("amqp://user:secret@broker:5672/shop", "http://broker:15672"),
        ("amqps://broker/", "https://broker:15671"),
        ("amqp://[::1]:5672/", "http://[::1]:15672"),
        ("amqp://", "http://localhost:15672"),
    ],
)
def test_the_management_interface_is_looked_for_beside_the_broker(broker: str, management: str) -> None:
    assert management_url_of(broker) == management
