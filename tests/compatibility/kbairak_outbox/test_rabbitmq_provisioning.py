"""Over RabbitMQ: "Pre-provisioning RabbitMQ Resources".

The rulings: delay queues hand a retry to the queue that failed, by the default exchange, so its own Terraform is
refused; an exchange `{exchange_name}.topology_v1` marks what was made for this library.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, ExchangeType
from pamqp.common import FieldTable

from outbox import ConfigurationError, Listener, Outbox, listen
from tests.support.broker import VirtualHost
from tests.support.observing import arrival
from tests.support.queues import taken

EXCHANGE_NAME = "outbox"
RETRY_DELAYS = (1, 10, 60, 300)
QUORUM: FieldTable = {"x-queue-type": "quorum"}
# "no configure, limited write, full read"
APPLICATION = {"configure": "^$", "write": r"^(outbox|outbox\.delay_.*)$", "read": ".*"}


@listen("user.created", queue="myapp.user_handler")
async def user_handler(user: object) -> None:
    raise AssertionError("no message is touched here")


def listeners() -> list[Listener]:
    """Two listeners that share a delay."""

    async def other(user: object) -> None: ...

    return [user_handler, Listener("user.*", other, queue="myapp.other", retry_delays=(5, 10))]


async def starting(url: str, *listeners: Listener, **options: Any) -> None:
    """A worker with a broker and no database: it starts, and ends."""
    async with Outbox(rabbitmq_url=url, **options).running(listeners=listeners):
        pass


# RabbitMQ resources created by outbox


async def test_a_worker_makes_what_the_project_lists_and_finds_it_the_next_time(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    await starting(vhost.url, *listeners())
    exchanges = {name: (one["type"], one["durable"]) for name, one in vhost.exchanges().items()}
    assert exchanges == {
        "outbox": ("topic", True),
        "outbox.dlx": ("direct", True),
        **{f"outbox.delay_{delay}s": ("fanout", True) for delay in (1, 5, 10, 60, 300)},
        "outbox.topology_v1": ("direct", True),
    }
    queues = {name: (one["durable"], one["arguments"]) for name, one in vhost.queues().items()}
    handed_on = {**QUORUM, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    limit = {"x-delivery-limit": -1} if vhost.server_version >= (4,) else {}
    expected: dict[str, dict[str, object]] = {}
    for queue in ("myapp.user_handler", "myapp.other"):
        expected[f"{queue}.dlq"] = {**QUORUM, **limit}
        dead_letters: FieldTable = {"x-dead-letter-exchange": "outbox.dlx", "x-dead-letter-routing-key": queue}
        expected[queue] = {**handed_on, **dead_letters, **limit}
    for delay in (1, 5, 10, 60, 300):
        arguments: FieldTable = {"x-message-ttl": delay * 1000, "x-dead-letter-exchange": ""}
        expected[f"outbox.delay_{delay}s"] = {**handed_on, **arguments}
    assert queues == {name: (True, arguments) for name, arguments in expected.items()}
    assert _bindings(vhost) == {
        ("outbox", "user.created", "myapp.user_handler"),
        ("outbox", "user.*", "myapp.other"),
        ("outbox.dlx", "myapp.user_handler", "myapp.user_handler.dlq"),
        ("outbox.dlx", "myapp.other", "myapp.other.dlq"),
        *((f"outbox.delay_{delay}s", "", f"outbox.delay_{delay}s") for delay in (1, 5, 10, 60, 300)),
    }
    await starting(vhost.url, *listeners())  # "If resources exist with correct config → succeeds silently"
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def _bindings(vhost: VirtualHost) -> set[tuple[str, str, str]]:
    return {(one["source"], one["routing_key"], one["destination"]) for one in vhost.bindings()}


# Terraform


async def terraform(channel: AbstractChannel) -> None:
    """Exchanges, queues and bindings word for word as the project provisions them."""
    main = await channel.declare_exchange(EXCHANGE_NAME, ExchangeType.TOPIC, durable=True)
    dlx = await channel.declare_exchange(f"{EXCHANGE_NAME}.dlx", ExchangeType.DIRECT, durable=True)
    for delay in RETRY_DELAYS:
        name = f"{EXCHANGE_NAME}.delay_{delay}s"
        exchange = await channel.declare_exchange(name, ExchangeType.FANOUT, durable=True)
        arguments: FieldTable = {"x-message-ttl": delay * 1000, "x-dead-letter-exchange": EXCHANGE_NAME, **QUORUM}
        queue = await channel.declare_queue(name, durable=True, arguments=arguments)
        await queue.bind(exchange, "")
    name = user_handler.queue
    dead_letters: FieldTable = {
        "x-dead-letter-exchange": f"{EXCHANGE_NAME}.dlx",
        "x-dead-letter-routing-key": name,
        **QUORUM,
    }
    queue = await channel.declare_queue(name, durable=True, arguments=dead_letters)
    await queue.bind(main, user_handler.binding_key)
    dlq = await channel.declare_queue(f"{name}.dlq", durable=True, arguments=QUORUM)
    await dlq.bind(dlx, name)


async def test_the_projects_own_terraform_is_refused_before_a_message_is_touched(
    vhost: VirtualHost, channel: AbstractChannel
) -> None:
    """Its delay queues hand a retry to every queue that is bound to its routing key."""
    await terraform(channel)
    exchange = await channel.get_exchange(EXCHANGE_NAME)
    await exchange.publish(aio_pika.Message(b"untouched"), "user.created")
    with pytest.raises(ConfigurationError, match=r"outbox\.topology_v1") as unmarked:
        await starting(vhost.url_of_user(**APPLICATION), user_handler)
    assert "`outbox topology" in str(unmarked.value)
    with pytest.raises(ConfigurationError, match="x-dead-letter-exchange") as differs:
        await starting(vhost.url, user_handler)
    for delay in RETRY_DELAYS:
        assert f"outbox.delay_{delay}s" in str(differs.value)
    assert "outbox.topology_v1" not in vhost.exchanges()
    message = await taken(channel, user_handler.queue)
    assert (message.body, message.redelivered) == (b"untouched", False)


async def test_whoever_deletes_the_delay_queues_of_the_projects_terraform_goes_on_with_the_rest(
    vhost: VirtualHost, channel: AbstractChannel, caplog: pytest.LogCaptureFixture
) -> None:
    await terraform(channel)
    for delay in RETRY_DELAYS:
        await channel.queue_delete(f"outbox.delay_{delay}s")
    heard: asyncio.Queue[Any] = asyncio.Queue()

    @listen("user.created", queue="myapp.user_handler")
    async def on_user_created(user: object, attempt_count: int, routing_key: str) -> None:
        heard.put_nowait((user, attempt_count, routing_key))

    exchange = await channel.get_exchange(EXCHANGE_NAME)
    waiting = aio_pika.Message(b"{}", headers={"x-delivery-count": "3", "x-original-routing-key": "user.created"})
    await exchange.publish(waiting, "user.created")
    async with Outbox(rabbitmq_url=vhost.url).running(listeners=[on_user_created]):
        assert await arrival(heard) == ({}, 1, "user.created")
    assert vhost.queues()["outbox.delay_10s"]["arguments"]["x-dead-letter-exchange"] == ""
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    limited = [record for record in warnings if "has no x-delivery-limit" in record.getMessage()]
    assert len(limited) == (2 if vhost.server_version >= (4,) else 0)
    warnings = [record for record in warnings if record not in limited]
    assert len(warnings) == 2
    for argument, record in zip(("x-dead-letter-strategy", "x-overflow"), warnings, strict=True):
        assert f"'myapp.user_handler' has no {argument}" in record.getMessage()
        assert "rabbitmqctl delete_queue myapp.user_handler" in record.getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


# What happens without pre-provisioning


async def test_every_mistake_of_the_project_is_told_when_the_worker_starts_and_touches_no_message(
    vhost: VirtualHost, channel: AbstractChannel
) -> None:
    url = vhost.url_of_user(**APPLICATION)
    with pytest.raises(ConfigurationError, match="lacks exchange 'outbox'") as nothing:
        await starting(url, user_handler)
    assert "queue 'myapp.user_handler'" in str(nothing.value)

    await starting(vhost.url, user_handler)  # whoever provisions
    await starting(url, user_handler)  # all is there
    exchange = await channel.get_exchange(EXCHANGE_NAME)
    await exchange.publish(aio_pika.Message(b"untouched"), "user.created")

    unwritable = vhost.url_of_user(configure="^$", write="^outbox$", read=".*")
    with pytest.raises(ConfigurationError, match=r"may not publish to exchange 'outbox\.delay_1s'"):
        await starting(unwritable, user_handler)
    overridden = listen("user.created", queue=user_handler.queue, retry_delays=(5, 15))(user_handler.callback)
    with pytest.raises(ConfigurationError, match=r"lacks exchange 'outbox\.delay_5s', .*'outbox\.delay_15s'"):
        await starting(url, overridden)
    await channel.exchange_delete("outbox.delay_10s")
    with pytest.raises(ConfigurationError, match=r"lacks exchange 'outbox\.delay_10s'"):
        await starting(url, user_handler)
    await channel.queue_delete("myapp.user_handler.dlq")
    with pytest.raises(ConfigurationError, match=r"queue 'myapp\.user_handler\.dlq'"):
        await starting(url, user_handler)
    message = await taken(channel, user_handler.queue)
    assert (message.body, message.redelivered) == (b"untouched", False)
