"""Two services on one database: neither takes the other's messages without a word."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.attempt import Done
from outbox.core.diagnosis import Level
from outbox.core.events import Advised, Handled
from outbox.doctor import examine
from outbox.owners import service_of
from outbox.transports.http import HttpTransport
from tests.support.commands import Command
from tests.support.databases import on_asyncpg, on_sqlite
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch

ORDERS = 10


def writing(effects: Effects, service: str, batch: int | None = None) -> Listener:
    """What each service calls `on_order`."""

    async def one(order: int, session: AsyncSession) -> None:
        await session.execute(effects.write(service, order))

    async def many(orders: list[int], session: AsyncSession) -> None:
        for order in orders:
            await session.execute(effects.write(service, order))

    return Listener("order.*", one if batch is None else many, queue="orders", batch=batch, retry_delays=())


# The inbox.


@on_asyncpg
@pytest.mark.parametrize("batch", [None, 5], ids=["single", "list"])
async def test_services_with_prefixes_of_their_own_each_get_every_message(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, rabbitmq_url: str, batch: int | None
) -> None:
    billing, shipping = (
        make_outbox(transport=rabbitmq_url, queue_prefix=f"{service}.", observers=[watch])
        for service in ("billing", "shipping")
    )
    async with (
        billing.running(relay=True, listeners=[writing(effects, "billing", batch)]),
        shipping.running(listeners=[writing(effects, "shipping", batch)]),
    ):
        await emit(billing, *range(ORDERS))
        ended = await watch.wait_for(Handled, 2 * ORDERS)
    assert all(isinstance(event.outcome, Done) for event in ended)
    assert sorted(await effects.all()) == ["billing"] * ORDERS + ["shipping"] * ORDERS


@on_asyncpg
async def test_what_was_handled_under_the_short_name_is_not_handled_again(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, rabbitmq_url: str
) -> None:
    """Entries that a version before made, or a worker that stored its deliveries first."""
    outbox = make_outbox(transport=rabbitmq_url, queue_prefix="billing.", observers=[watch])
    async with outbox.transaction() as session:
        known, new = [await outbox.emit(session, "order.created", number) for number in range(2)]
        assert known is not None and new is not None
        await session.run_sync(lambda plain: outbox.store.inbox.remember_all(plain.connection(), "orders", [known.id]))
    async with outbox.running(relay=True, listeners=[writing(effects, "billing")]):
        ended = await watch.wait_for(Handled, 2)
    assert {event.attempt.message.id for event in ended} == {known.id, new.id}
    assert await effects.all() == ["billing"]


# Whose a queue is.


def named(service: str, name: str = "on_order") -> Listener:
    """A listener of a package that is called like its service."""

    async def on_order(order: int) -> None: ...

    on_order.__module__, on_order.__qualname__ = f"{service}.handlers", name
    return Listener("order.*", on_order, queue="orders")


async def test_a_worker_that_serves_a_queue_of_another_service_says_so(make_outbox: MakeOutbox) -> None:
    watches = [Watch() for _ in range(4)]
    outboxes = [make_outbox(observers=[watch]) for watch in watches[:3]]
    services = [named("billing"), named("billing", "renamed"), named("shipping")]
    for outbox, listener in zip(outboxes, services, strict=True):
        async with outbox.running(listeners=[listener]):
            pass
    assert watches[0].of(Advised) == watches[1].of(Advised) == []
    [advised] = watches[2].of(Advised)
    assert advised.where == "the queue 'orders'"
    assert "belongs to the service 'billing', and this one is 'shipping'" in advised.advice
    assert await outboxes[0].store.owners.all() == {"orders": "billing"}

    told = make_outbox(observers=[watches[3]], service="billing")
    async with told.running(listeners=[named("shipping")]):
        pass
    assert watches[3].of(Advised) == []


@on_sqlite
async def test_a_queue_that_is_released_belongs_to_the_next_service(
    make_outbox: MakeOutbox, command: Command, watch: Watch
) -> None:
    outbox = make_outbox(observers=[watch])
    async with outbox.running(listeners=[named("before")]):
        pass
    ran = await command.run("queues", "release", "orders")
    assert (ran.code, ran.stdout) == (0, "orders does not belong to before any more\n")
    async with outbox.running(listeners=[named("after")]):
        pass
    assert watch.of(Advised) == []
    assert await outbox.store.owners.all() == {"orders": "after"}
    assert (await command.run("queues", "release", "unknown")).code == ExitCode.WRONG


@on_asyncpg
async def test_with_a_prefix_it_is_the_brokers_queue_that_belongs_to_a_service(
    make_outbox: MakeOutbox, watch: Watch, rabbitmq_url: str
) -> None:
    for service in ("billing", "shipping"):
        outbox = make_outbox(transport=rabbitmq_url, queue_prefix=f"{service}.", observers=[watch])
        async with outbox.running(listeners=[named(service)]):
            pass
    assert watch.of(Advised) == []
    owners = await outbox.store.owners.all()
    assert {queue: owner for queue, owner in owners.items() if queue} == {
        "billing.orders": "billing",
        "shipping.orders": "shipping",
    }
    assert owners[""].startswith("amqp://") and "@" not in owners[""]


@on_sqlite
async def test_stored_first_two_prefixes_share_a_queue_of_the_database_and_the_second_says_so(
    make_outbox: MakeOutbox, watch: Watch, rabbitmq_url: str
) -> None:
    for prefix in ("billing.", "shipping."):
        outbox = make_outbox(transport=rabbitmq_url, queue_prefix=prefix, observers=[watch])
        async with outbox.running(listeners=[named("shop")], store_first=True):
            pass
    [advised] = watch.of(Advised)
    assert advised.where == "the queue 'orders'"
    assert "'shop, for billing.orders', and this one is 'shop, for shipping.orders'" in advised.advice


async def test_a_worker_without_a_database_records_nothing(rabbitmq_url: str, watch: Watch) -> None:
    outbox = Outbox(transport=rabbitmq_url, observers=[watch])
    async with outbox.running(listeners=[named("billing")]):
        pass
    assert watch.of(Advised) == []


# Where messages go.


async def publish(message: Message) -> None: ...


@on_sqlite
async def test_another_address_of_the_same_transport_is_told_and_may_be_switched_to(
    make_outbox: MakeOutbox, command: Command
) -> None:
    """HTTP here; the password is neither compared nor shown."""
    watches = [Watch() for _ in range(4)]
    urls = [
        "https://hooks.example.com/events",
        "https://user:secret@hooks.example.com/events?token=secret",
        "https://user:secret@other.example.com/events",
        "https://other.example.com/events",
    ]
    outboxes = [make_outbox(transport=url, observers=[watch]) for url, watch in zip(urls, watches, strict=True)]
    for outbox in outboxes[:3]:
        async with outbox.running(relay=True):
            pass
    assert watches[0].of(Advised) == watches[1].of(Advised) == []
    [advised] = watches[2].of(Advised)
    assert "https://hooks.example.com/events elsewhere, and to https://other.example.com/events here" in advised.advice
    assert "secret" not in str(advised)
    findings = [finding for finding in await examine(outboxes[3]) if finding.subject == "transport"]
    assert [finding.level for finding in findings] == [Level.OK, Level.WARNING]
    assert "outbox tables switch-transport http" in findings[1].advice

    ran = await command.run("tables", "switch-transport", "http", OUTBOX_TRANSPORT=urls[3])
    assert ran.code == 0
    async with outboxes[3].running(relay=True):
        pass
    assert watches[3].of(Advised) == []
    assert await outboxes[3].store.owners.all() == {"": "https://other.example.com/events"}


@on_sqlite
async def test_two_functions_are_told_apart_by_module_and_name(make_outbox: MakeOutbox) -> None:
    watches = [Watch(), Watch()]

    async def publish(message: Message) -> None: ...

    for function, watch in zip((globals()["publish"], publish), watches, strict=True):
        async with make_outbox(transport=function, observers=[watch]).running(relay=True):
            pass
    assert watches[0].of(Advised) == []
    [advised] = watches[1].of(Advised)
    assert f"{__name__}.publish elsewhere" in advised.advice


def sending(package: str) -> Callable[[Message], Awaitable[None]]:
    async def send(message: Message) -> None: ...

    send.__module__, send.__qualname__ = f"{package}.sending", "send"
    return send


@on_sqlite
@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (lambda: sending("billing"), lambda: sending("shipping"), "send"),
        (
            lambda: HttpTransport("https://hooks.example.com/a", name="hooks"),
            lambda: HttpTransport("https://hooks.example.com/b", name="hooks"),
            "hooks",
        ),
    ],
    ids=["functions", "http"],
)
async def test_another_address_of_a_route_is_told_and_the_route_may_be_released(
    make_outbox: MakeOutbox, command: Command, first: Callable[[], Any], second: Callable[[], Any], name: str
) -> None:
    watches = [Watch() for _ in range(4)]
    makes = [first, first, second, second]
    outboxes = [
        make_outbox(routes={"#": make()}, observers=[watch]) for make, watch in zip(makes, watches, strict=True)
    ]
    for outbox in outboxes[:3]:
        async with outbox.running(relay=True):
            pass
    assert watches[0].of(Advised) == watches[1].of(Advised) == []
    [advised] = watches[2].of(Advised)
    assert advised.where == f"the route '{name}'" and "each place gets a part of them" in advised.advice
    [finding] = [each for each in await examine(outboxes[3]) if each.level is Level.WARNING]
    assert finding.subject == "transport" and finding.what.startswith(f"{name}: its messages go to ")
    assert finding.advice.endswith(f"outbox queues release {name}")

    assert (await command.run("queues", "release", name)).code == 0
    async with outboxes[3].running(relay=True):
        pass
    assert watches[3].of(Advised) == []


@on_sqlite
async def test_doctor_finds_a_queue_of_another_service(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    async with outbox.running(listeners=[named("billing")]):
        pass
    of_queues = [
        [finding for finding in await examine(outbox, [named(service)]) if finding.subject == "queues"]
        for service in ("billing", "shipping")
    ]
    assert of_queues[0] == []
    [finding] = of_queues[1]
    assert finding.level is Level.WARNING
    assert finding.what.startswith("orders: it belongs to the service 'billing', and this one is 'shipping'")
    assert finding.advice.endswith("outbox queues release orders")


def test_a_listener_of_a_program_belongs_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("__main__")
    program.__file__ = "/srv/shop.py"
    monkeypatch.setitem(sys.modules, "__main__", program)
    listener = named("__main__")
    listener.callback.__module__ = "__main__"
    assert service_of(listener) == "shop"
    program.__spec__ = ModuleSpec("billing.worker", None)
    assert service_of(listener) == "billing"
    assert service_of(Listener("a", functools.partial(named("mails").callback), queue="q")) == "mails"
