"""`outbox doctor` on RabbitMQ: what it finds at the broker, with the management interface and without."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from pamqp import commands

from outbox import Binding, ConfigurationError, Listener, Outbox, Reject
from outbox.cli.exits import ExitCode
from outbox.core.dead_letter import DeadLetters
from outbox.core.diagnosis import Level
from outbox.doctor import examine
from outbox.testing.servers import RabbitMQ
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq import dead_letters as rabbitmq_dead_letters
from outbox.transports.rabbitmq.headers import CREATED_AT
from outbox.transports.rabbitmq.management import management_url_of
from outbox.transports.rabbitmq.topology import Names, Topology
from tests.support.amqp import channel_to, declare_at, has_rejected
from tests.support.broker import VirtualHost
from tests.support.commands import Command, until

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

    async def complains_of(self, subject: str, listeners: str = "", *, fresh: str = "1h") -> list[Told]:
        """Its findings about one subject that are not fine."""
        self.command.settings["OUTBOX_FRESH_DEAD_LETTERS"] = fresh
        return [each for each in await self.finds(listeners) if each[0] != "ok" and each[1] == subject]

    async def complains(self, listeners: str = "listeners", **options: str) -> list[Told]:
        """Its findings that are not fine; that nobody consumes is left out too."""
        return [each for each in await self.finds(listeners, **options) if each[0] != "ok" and each[1] != "consumers"]


async def provision(vhost: VirtualHost, listeners: Sequence[Listener] = LISTENERS) -> None:
    delays, version = [timedelta(seconds=1)], vhost.server_version
    await declare_at(vhost.url, Topology.of(Names(), listeners, delays, server_version=version))


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
        ("ok", "dead letters"),
    ]
    assert doctor.code == ExitCode.FINE
    assert "RabbitMQ " in found[0][2]
    assert "guest:guest" not in doctor.said


@pytest.mark.parametrize("management_url", ["", NOWHERE], ids=["management", "no management"])
async def test_everything_that_is_missing_is_told_once_and_nothing_is_made(
    doctor: Doctor, vhost: VirtualHost, management_url: str
) -> None:
    found = await doctor.finds(management_url=management_url)
    assert doctor.code == ExitCode.UNHEALTHY
    [(subject, missing)] = [(subject, what) for level, subject, what in found if level == "error"]
    topology = Topology.of(Names(), LISTENERS, ())
    names = [*(each.name for each in topology.exchanges), *(each.name for each in topology.queues)]
    assert (subject, missing.endswith("is there yet")) == ("exchanges and queues", True)
    assert {name for name in [*names, "outbox.topology_v1"] if f"{name!r}" not in missing} == set()
    assert "consumers" not in {subject for _, subject, _ in found}, "there is nothing to consume"
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
    limit = {"x-delivery-limit": -1} if vhost.server_version >= (4,) else {}
    strong = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    arguments: dict[str, dict[str, Any]] = {
        "outbox.delay_1s": {**quorum, **delayed, **strong},
        "billing": {**quorum, **limit, "x-dead-letter-exchange": "outbox.dlx", "x-dead-letter-routing-key": "billing"},
        "shipping.dlq": {**quorum, **limit, "x-quorum-initial-group-size": 1},
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


async def test_a_queue_that_limits_deliveries_is_mended_by_a_policy(doctor: Doctor, vhost: VirtualHost) -> None:
    if vhost.server_version < (4,):
        pytest.skip("before 4.0 no queue limits deliveries unless it was told to")
    await declare_at(vhost.url, Topology.of(Names(), LISTENERS, [timedelta(seconds=1)]))
    told = await doctor.complains()
    assert {(level, subject) for level, subject, _ in told} == {("warning", "queues")}
    assert [what for _, _, what in told if "'billing' has no x-delivery-limit instead of x-delivery-limit=-1" in what]
    assert all("21 lost connections" in what for _, _, what in told)
    definition, pattern = {"delivery-limit": -1}, "^(billing|shipping)(\\.dlq)?$"
    options = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
    vhost.management.ask("PUT", "policies", vhost.name, "unlimited", **options)
    await until(lambda: vhost.queues()["billing"].get("effective_policy_definition"))
    assert not await doctor.complains()


async def test_a_queue_without_consumers_is_a_warning_and_with_messages_an_error(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        await channel.basic_consume("shipping", ignore)
        consumers = [each for each in await doctor.finds() if each[1] == "consumers"]
        assert consumers == [("warning", "consumers", "no worker consumes 'billing', 0 waiting")]
        assert doctor.code == ExitCode.FINE
        await channel.basic_publish(b"{}", exchange="outbox", routing_key="order.changed")

        async def is_an_error() -> bool:  # a quorum queue tells its length a few seconds later
            told = await doctor.finds()
            return ("error", "consumers", "no worker consumes 'billing', 1 waiting") in told

        await until(is_an_error)
        assert doctor.code == ExitCode.UNHEALTHY


async def test_queues_that_nobody_needs_and_nobody_consumes_are_listed(doctor: Doctor, vhost: VirtualHost) -> None:
    old = Listener("order.*", print, queue="old", retry_delays=(7,))
    await provision(vhost, [*LISTENERS, old])
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare("of somebody else")
        assert await doctor.complains() == [
            (
                "warning",
                "orphaned queues",
                f"none of these listeners needs {queue!r} and no worker consumes it, 0 waiting",
            )
            for queue in ("old", "old.dlq", "outbox.delay_7s")
        ]
        await channel.basic_consume("old", ignore)
        assert await doctor.complains() == []


async def test_steps_of_a_function_are_neither_missing_nor_orphaned(doctor: Doctor, vhost: VirtualHost) -> None:
    computed = Listener("order.*", print, queue="billing", retry_delays=lambda attempt_count, error: 1)
    await provision(vhost, [computed])
    assert await doctor.complains("computed") == []
    version = vhost.server_version
    await declare_at(vhost.url, Topology.of(Names(), [computed], (), steps=True, server_version=version))
    assert await doctor.complains("computed") == []


async def test_without_the_management_interface_the_rest_is_looked_at(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    found = {subject: (level, what) for level, subject, what in await doctor.finds(management_url=NOWHERE)}
    assert {subject for subject, (level, _) in found.items() if level == "ok"} >= {"broker", "exchanges", "queues"}
    level, what = found["management"]
    assert level == "warning"
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


async def test_without_listeners_queues_without_a_consumer_are_found(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        await channel.basic_consume("shipping", ignore)
        told = await doctor.complains_of("consumers")
        assert told == [("warning", "consumers", "no worker consumes 'billing', 0 waiting")]


async def test_fresh_dead_letters_at_the_broker_are_an_error_by_queue_and_reason(
    doctor: Doctor, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject(order: Any) -> None:
        raise Reject("no such order")

    outbox = Outbox(transport=vhost.url, observers=[])
    async with outbox.running(listeners=[Listener("order.*", reject, queue="billing")]), channel_to(vhost.url) as there:
        for number in range(3):
            await there.basic_publish(str(number).encode(), exchange="outbox", routing_key="order.created")
        letters = outbox.dead_letters
        await until(lambda: _has_letters(letters, 3))
        told = await doctor.complains_of("dead letters", "")
        assert told == [("error", "dead letters", "3 in the queue 'billing', in the last 1h: 3 rejected")]
        assert doctor.code == ExitCode.UNHEALTHY
        assert await doctor.complains_of("dead letters", "", fresh="0") == []
        monkeypatch.setattr(rabbitmq_dead_letters, "MOST_LETTERS_READ", 2)
        told = await doctor.complains_of("dead letters")
        assert told == [("error", "dead letters", "3 in the queue 'billing', too many to read when they died")]
        await asyncio.sleep(0.01)
        monkeypatch.undo()
        assert await doctor.complains_of("dead letters", "", fresh="10ms") == []


async def test_letters_that_no_worker_wrote_a_time_in_are_not_taken_for_old_ones(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    """Of one the broker says when it died, of another nothing does."""
    await provision(vhost)
    async with channel_to(vhost.url) as channel:
        unreadable = commands.Basic.Properties(headers={CREATED_AT: "no moment"})
        await channel.basic_publish(b"1", exchange="outbox", routing_key="order.paid", properties=unreadable)
        await until(lambda: has_rejected(channel, "billing"))
        await channel.basic_publish(b"2", routing_key="billing.dlq")
        await channel.basic_publish(b"3", routing_key="shipping.dlq")
        told = await doctor.complains_of("dead letters")
    assert told == [
        (
            "error",
            "dead letters",
            "2 in the queue 'billing', in the last 1h: 1 rejected at an unknown time, 1 undecodable",
        ),
        ("error", "dead letters", "1 in the queue 'shipping', in the last 1h: 1 rejected at an unknown time"),
    ]


async def with_letters(outbox: Outbox, vhost: VirtualHost, count: int = 1) -> None:
    """Have a worker reject so many messages, and end it."""

    async def reject(order: Any) -> None:
        raise Reject("no such order")

    async with outbox.running(listeners=[Listener("order.*", reject, queue="billing")]), channel_to(vhost.url) as there:
        for number in range(count):
            await there.basic_publish(str(number).encode(), exchange="outbox", routing_key="order.created")
        await until(lambda: _has_letters(outbox.dead_letters, count))


async def test_letters_of_recorded_queues_are_an_error_although_the_management_interface_is_away(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    url = f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}"
    outbox = Outbox(db_engine_url=url, transport=vhost.url, observers=[])
    await with_letters(outbox, vhost, 3)
    await outbox.close()
    doctor.command.settings["OUTBOX_DB_ENGINE_URL"] = url
    told = [each for each in await doctor.finds("", management_url=NOWHERE) if each[1] == "dead letters"]
    assert told == [
        ("ok", "dead letters", "none of relays in the last 1h"),
        ("error", "dead letters", "3 in the queue 'billing', in the last 1h: 3 rejected"),
    ]
    assert doctor.code == ExitCode.UNHEALTHY


@pytest.mark.parametrize("database", ["with a relay's database", "no database"])
async def test_where_no_queue_is_known_the_doctor_warns_that_it_could_not_look(
    doctor: Doctor, vhost: VirtualHost, database: str
) -> None:
    await with_letters(Outbox(transport=vhost.url, observers=[]), vhost, 3)  # a worker without a database
    if database == "with a relay's database":
        url = f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}"
        doctor.command.settings["OUTBOX_DB_ENGINE_URL"] = url
        async with Outbox(db_engine_url=url, transport=vhost.url, observers=[]).running(relay=True):
            pass
    told = [each for each in await doctor.finds("", management_url=NOWHERE) if each[0] == "warning"]
    assert told == [("warning", "queues", "not known: consumers and dead letters were not looked at")]
    assert doctor.code == ExitCode.FINE
    strict = await doctor.command.run("doctor", "--strict", OUTBOX_RABBITMQ_MANAGEMENT_URL=NOWHERE)
    assert strict.code == ExitCode.UNHEALTHY
    assert "MODULE:ATTRIBUTE" in strict.stdout and "rabbitmq_management_url" in strict.stdout


@pytest.mark.parametrize("kind", ["connection", "transport"])
async def test_a_broker_that_the_application_gave_is_examined_too(
    doctor: Doctor, vhost: VirtualHost, kind: str
) -> None:
    connection = await aio_pika.connect(vhost.url)
    given = {"rmq_connection": connection} if kind == "connection" else {"transport": RabbitmqTransport(vhost.url)}
    try:
        outbox = Outbox(**given, rabbitmq_management_url=doctor.management_url, observers=[])
        await with_letters(outbox, vhost)
        found = [(each.level, each.subject, each.what) for each in await examine(outbox)]
    finally:
        await connection.close()
    assert ("error", "dead letters", "1 in the queue 'billing', in the last 1h: 1 rejected") in found
    assert ("warning", "consumers", "no worker consumes 'billing', 0 waiting") in found


async def test_a_connection_that_was_given_is_counted_in_its_own_virtual_host(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    connection = await aio_pika.connect(vhost.url)
    outbox = Outbox(
        db_engine_url=f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}",
        rmq_connection=connection,
        rabbitmq_management_url=doctor.management_url,
        observers=[],
    )
    await outbox.create_tables()
    assert [row.queue for row in (await outbox.backlog()).queues] == ["billing", "shipping"]
    async with channel_to(vhost.url) as channel:
        await channel.basic_publish(b"{}", exchange="outbox.dlx", routing_key="billing")

        async def one_is_dead() -> bool:  # the interface tells numbers that are up to five seconds old
            return (await outbox.backlog()).dead == 1

        await until(one_is_dead)
    billing, shipping = (await outbox.backlog()).queues
    assert (billing.queue, billing.dead, billing.binding_keys) == ("billing", 1, ("order.*",))
    assert (shipping.queue, shipping.dead, shipping.binding_keys) == ("shipping", 0, ("order.created",))
    assert isinstance(outbox.transport, RabbitmqTransport)
    found = await outbox.transport.bindings(["billing"], at_start=True)
    assert found == [Binding("billing", "order.*")]
    assert {each.queue for each in await outbox.dead_letters.list()} == {"billing"}
    await connection.close()
    await outbox.close()


async def test_a_connection_without_a_url_is_counted_without_the_management_interface(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    connection = await aio_pika.connect(vhost.url)
    outbox = Outbox(
        db_engine_url=f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}",
        rmq_connection=connection,
        rabbitmq_management_url=doctor.management_url,
        observers=[],
    )
    await with_letters(outbox, vhost)
    del connection.url

    async def one_is_dead() -> bool:  # a quorum queue tells its length a few seconds later
        return (await outbox.backlog()).dead == 1

    await until(one_is_dead)
    told = {each.what for each in await examine(outbox) if each.level is Level.ERROR}
    assert told == {"1 in the queue 'billing', in the last 1h: 1 rejected"}
    transport = outbox.transport
    assert isinstance(transport, RabbitmqTransport)
    with pytest.raises(ConfigurationError, match="does not tell its URL"):
        await transport.bindings(["billing"], at_start=True)
    await connection.close()
    await outbox.close()


async def test_a_connection_that_was_closed_makes_the_numbers_unknown(doctor: Doctor, vhost: VirtualHost) -> None:
    connection = await aio_pika.connect(vhost.url)
    url = f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}"
    outbox = Outbox(db_engine_url=url, rmq_connection=connection, observers=[])
    await outbox.create_tables()
    await outbox.store.owners.record({"billing": "shop"})
    await connection.close()
    found = await outbox.backlog()
    [billing] = found.queues
    assert (found.dead, found.leased, billing.queued, billing.dead) == (None, None, None, None)
    await outbox.close()


async def test_a_queue_of_the_broker_is_deleted_there_and_the_command_for_the_database_says_so(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    command = doctor.command
    command.settings["OUTBOX_DB_ENGINE_URL"] = f"sqlite+aiosqlite:///{command.folder / 'outbox.db'}"
    assert (await command.run("tables", "create")).code == 0
    for prefix, named, told in (("", "billing", "billing"), ("eu.", "billing", "eu.billing"), ("", "eu us", "'eu us'")):
        ran = await command.run("queues", "remove", named, OUTBOX_QUEUE_PREFIX=prefix)
        assert (ran.code, ran.error_lines) == (ExitCode.WRONG, 1)
        assert "the database has no queue" in ran.stderr and "queues of the database only" in ran.stderr
        assert f"rabbitmqctl delete_queue {told}\n" in ran.stderr
    assert "billing" in vhost.queues()


async def has_statistics(vhost: VirtualHost) -> bool:
    """Whether the interface has numbers of all queues, however old."""
    return all("messages" in queue for queue in (await asyncio.to_thread(vhost.queues)).values())


@pytest.mark.parametrize("management", [True, False], ids=["management", "no management"])
async def test_a_broker_behind_routes_is_counted_and_examined_or_its_numbers_are_unknown(
    doctor: Doctor, vhost: VirtualHost, management: bool
) -> None:
    await with_letters(Outbox(transport=vhost.url, observers=[]), vhost)
    await until(lambda: has_statistics(vhost))
    command = doctor.command
    del command.settings["OUTBOX_TRANSPORT"]
    url = f"sqlite+aiosqlite:///{command.folder / 'outbox.db'}"
    interface = doctor.management_url if management else ""
    command.settings |= {"OUTBOX_DB_ENGINE_URL": url, "OUTBOX_ROUTES": json.dumps({"#": vhost.url})}
    command.settings |= {"OUTBOX_RABBITMQ_MANAGEMENT_URL": interface} if management else {}
    outbox = Outbox(db_engine_url=url, routes={"#": vhost.url}, rabbitmq_management_url=interface, observers=[])
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", range(2))

        async def all_are_sent() -> bool:
            return not await outbox.messages()

        await until(all_are_sent)
    found = await outbox.backlog()
    await outbox.close()
    document = (await command.run("status", "--json", "--interval", "0")).document
    numbers = (1, 0) if management else (None, None)
    assert (document["dead"], document["leased"]) == (found.dead, found.leased) == numbers
    rows = {each.queue: (each.queued, each.dead) for each in found.queues if each.transport == "rabbitmq"}
    assert rows == ({"billing": (2, 1)} if management else {})
    assert (await command.run("queues", "list", "--json")).document["queues_known"] is management
    assert "may wait there: see outbox queues list" in (await command.run("messages", "list")).stdout
    ran = await command.run("doctor", "--json")
    told = {(each["subject"], each["level"]) for each in ran.document["findings"]}
    bad = {("consumers", "error"), ("dead letters", "error")} if management else {("queues", "warning")}
    assert told >= {("broker", "ok"), *bad}
    assert "guest:guest" not in ran.said


async def test_what_has_just_come_is_counted_although_the_management_interface_does_not_know_it_yet(
    doctor: Doctor, vhost: VirtualHost
) -> None:
    await provision(vhost)
    url = f"sqlite+aiosqlite:///{doctor.command.folder / 'outbox.db'}"
    outbox = Outbox(db_engine_url=url, transport=vhost.url, rabbitmq_management_url=doctor.management_url, observers=[])
    await outbox.create_tables()
    async with channel_to(vhost.url) as channel:
        await until(lambda: has_statistics(vhost))
        await channel.confirm_delivery()
        for number in range(5):
            await channel.basic_publish(str(number).encode(), exchange="outbox", routing_key="order.created")
        found = await outbox.backlog()
    await outbox.close()
    assert [(row.queue, row.queued, row.consumers) for row in found.queues] == [
        ("billing", 5, 0),
        ("shipping", 5, 0),
    ]


async def test_with_the_management_interface_all_queues_are_counted(doctor: Doctor, vhost: VirtualHost) -> None:
    await provision(vhost)
    command = Command(doctor.command.folder, dict(doctor.command.settings))
    command.settings["OUTBOX_DB_ENGINE_URL"] = f"sqlite+aiosqlite:///{command.folder / 'outbox.db'}"
    command.settings["OUTBOX_RABBITMQ_MANAGEMENT_URL"] = doctor.management_url
    assert (await command.run("tables", "create")).code == 0
    arrived = asyncio.Event()

    async def hold(message: object) -> None:
        arrived.set()

    async with channel_to(vhost.url) as channel:
        await channel.basic_consume("shipping", hold)
        await channel.basic_publish(b"{}", exchange="outbox", routing_key="order.created")
        await channel.basic_publish(b"{}", exchange="outbox.dlx", routing_key="billing")
        await arrived.wait()
        counted: dict[str, dict[str, Any]] = {}

        async def all_of_it() -> bool:  # the interface tells numbers that are up to five seconds old
            found = (await command.run("queues", "list", "--json")).document["queues"]
            counted.update({each["queue"]: each for each in found})
            shipping = counted["shipping"]
            return bool((shipping["leased"], shipping["consumers"], counted["billing"]["dead"]) == (1, 1, 1))

        await until(all_of_it)
        document = (await command.run("status", "--json", "--interval", "0")).document
        assert (document["leased"], document["dead"]) == (1, 1)
    billing, shipping = counted["billing"], counted["shipping"]
    assert (billing["binding_keys"], billing["queued"], billing["leased"]) == (["order.*"], 1, 0)
    assert (shipping["binding_keys"], shipping["queued"]) == (["order.created"], 1)
    assert (billing["consumers"], shipping["consumers"], shipping["dead"]) == (0, 1, 0)


async def _has_letters(letters: DeadLetters, count: int) -> bool:
    return len(await letters.list(queue="billing")) == count


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
