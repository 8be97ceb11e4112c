"""Declaring on a real RabbitMQ: what is made, what is only looked at, and what is refused with advice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
from pamqp.common import FieldTable

from outbox import ConfigurationError, Listener, RetryPolicy
from outbox.transports.rabbitmq.declaring import Declared, declare_for
from outbox.transports.rabbitmq.mismatch import Mismatch
from outbox.transports.rabbitmq.topology import Names, Queue, Topology
from tests.support.amqp import OFFERED_BEFORE, arrival, channel_to, connected, declare_at, has_rejected, taken
from tests.support.broker import VirtualHost
from tests.support.commands import until

NAMES = Names()
DELAYS = (timedelta(milliseconds=100), timedelta(seconds=10))
BILLING = Listener("order.*", print, queue="billing")
SHIPPING = Listener("order.created", print, queue="shipping")
QUORUM: FieldTable = {"x-queue-type": "quorum"}
HANDED_ON = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}

LEAST = {"write": r"^outbox\.(delay_.*|dlx)$", "read": "^(billing|shipping)$"}  # what a worker needs, and no more


def told(vhost: VirtualHost) -> dict[str, str]:
    """The least with which a user is told of everything: from 4.3 on that takes some right on each name."""
    return LEAST if vhost.server_version < (4, 3) else LEAST | {"read": ".*"}


def topology_of(*listeners: Listener, delays: Sequence[timedelta] = DELAYS) -> Topology:
    return Topology.of(NAMES, listeners or (BILLING, SHIPPING), delays)


def arguments_of(queue: Queue) -> FieldTable:
    """As the library for the wire has them."""
    return {**cast(FieldTable, queue.arguments)}


# Whoever may configure.


async def test_everything_that_is_missing_is_made(vhost: VirtualHost) -> None:
    topology = topology_of()
    declared = await declare_at(vhost.url, topology)
    assert declared == Declared(configures=True, dead_letters=True)
    exchanges = {name: (each["type"], each["durable"]) for name, each in vhost.exchanges().items()}
    assert exchanges == {
        **{exchange.name: (exchange.kind, True) for exchange in topology.exchanges},
        "outbox.topology_v1": ("direct", True),
    }
    queues = {name: (each["arguments"], each["durable"]) for name, each in vhost.queues().items()}
    assert queues == {queue.name: (queue.arguments, True) for queue in topology.queues}
    bindings = {(each["source"], each["destination"], each["routing_key"]) for each in vhost.bindings()}
    assert bindings == {(each.exchange, each.queue, each.routing_key) for each in topology.bindings}


async def test_what_exists_already_is_fine(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of(BILLING))
    assert await declare_at(vhost.url, topology_of()) == Declared(configures=True, dead_letters=True)
    assert await declare_at(vhost.url, topology_of()) == Declared(configures=True, dead_letters=True)
    assert set(vhost.queues()) >= {"billing", "shipping", "billing.dlq", "shipping.dlq"}


@pytest.mark.parametrize("delay", [timedelta(0), timedelta(milliseconds=100)], ids=str)
async def test_a_retry_comes_back_to_the_queue_that_it_names_and_to_no_other(
    vhost: VirtualHost, delay: timedelta
) -> None:
    await declare_at(vhost.url, topology_of(delays=[delay]))
    async with channel_to(vhost.url) as channel:
        await channel.confirm_delivery()
        await channel.basic_publish(b"again", exchange=NAMES.delay(delay), routing_key="billing", mandatory=True)
        assert await arrival(channel, "billing") == b"again"
        assert await taken(channel, "shipping") is None


async def test_the_broker_keeps_a_rejected_message_as_a_dead_letter(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.basic_publish(b"never", exchange="outbox", routing_key="order.changed")
        await until(lambda: has_rejected(channel, "billing"))
        assert await arrival(channel, "billing.dlq") == b"never"


async def test_declaring_publishes_nothing(vhost: VirtualHost) -> None:
    """Rights are asked for without a message: a listener to everything would get it."""
    everything = Listener("#", print, queue="everything")
    await declare_at(vhost.url, topology_of(everything))
    await declare_at(vhost.url, topology_of(everything))
    await declare_at(vhost.url, Topology.of_relay(NAMES))
    async with channel_to(vhost.url) as channel:
        await channel.basic_publish(b"first", exchange="outbox", routing_key="order.changed")
        assert await arrival(channel, "everything") == b"first"
        assert await taken(channel, "everything") is None
        assert await taken(channel, "everything.dlq") is None


async def test_a_user_needs_no_more_than_its_own_names_to_make_everything(vhost: VirtualHost) -> None:
    own = r"outbox(\..*)?|(billing|shipping)(\.dlq)?"
    url = vhost.url_of_user(configure=f"^({own})$", write=rf"^({own}|amq\.default)$", read=f"^({own})$")
    assert await declare_at(url, topology_of()) == Declared(configures=True, dead_letters=True)
    assert await declare_at(url, topology_of()) == Declared(configures=True, dead_letters=True)


# What exists with other arguments.


@pytest.mark.parametrize(
    ("queue", "durable", "argument", "there", "wanted"),
    [
        (Queue("billing", {}), True, "x-queue-type", None, "quorum"),
        (Queue("billing", {}), False, "durable", False, True),
        (Queue("billing", QUORUM), True, "x-dead-letter-exchange", None, "outbox.dlx"),
        (Queue("billing", QUORUM | {"x-max-length": 5}), True, "x-max-length", 5, None),
        (Queue("billing.dlq", QUORUM | {"x-message-ttl": 5000}), True, "x-message-ttl", 5000, None),
        (Queue("outbox.delay_10s", QUORUM | {"x-message-ttl": 1000}), True, "x-message-ttl", 1000, 10_000),
        (
            Queue("outbox.delay_10s", QUORUM | {"x-message-ttl": 10_000, "x-dead-letter-exchange": "outbox"}),
            True,
            "x-dead-letter-exchange",
            "outbox",
            "",
        ),
    ],
    ids=["classic", "not durable", "no dead letters", "short", "forgetful", "sooner", "to everybody"],
)
async def test_a_queue_with_other_arguments_is_refused_with_the_difference_and_a_way_out(
    vhost: VirtualHost, queue: Queue, durable: bool, argument: str, there: Any, wanted: Any
) -> None:
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare(queue.name, durable=durable, arguments=arguments_of(queue))
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(vhost.url, topology_of())
    said = str(refused.value)
    if argument == "x-queue-type" and vhost.server_version >= (4,):
        there = "classic"  # which before 4.0 is the same as none
    assert str(Mismatch("queue", queue.name, argument, there, wanted)) in said
    assert f"rabbitmqctl delete_queue {queue.name}" in said
    assert not vhost.bindings()
    assert "outbox.topology_v1" not in vhost.exchanges()


async def test_all_differences_are_told_at_once(vhost: VirtualHost) -> None:
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare(
            "billing", durable=True, arguments=QUORUM | {"x-max-length": 5, "x-expires": 60_000}
        )
        await channel.queue_declare("shipping", durable=True, arguments=QUORUM)
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(vhost.url, topology_of())
    told = str(refused.value)
    for name, argument in [
        ("billing", "x-max-length=5"),
        ("billing", "x-expires=60000"),
        ("billing", "no x-dead-letter-exchange"),
        ("billing", "no x-dead-letter-routing-key"),
        ("shipping", "no x-dead-letter-exchange"),
    ]:
        assert f"the queue {name!r} has {argument} " in told


async def test_a_difference_is_told_even_if_the_brokers_answer_is_cut_off(vhost: VirtualHost) -> None:
    name = "q" * 240
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare(name, durable=True, arguments=QUORUM | {"x-message-ttl": 5000})
    with pytest.raises(ConfigurationError, match=f"{name}' has x-dead-letter-exchange='something else' instead of"):
        await declare_at(vhost.url, topology_of(Listener("#", print, queue=name)))


async def test_an_exchange_of_another_kind_is_refused(vhost: VirtualHost) -> None:
    async with channel_to(vhost.url) as channel:
        await channel.exchange_declare("outbox", exchange_type="direct", durable=True)
    with pytest.raises(ConfigurationError, match="the exchange 'outbox' has type='direct' instead of type='topic'"):
        await declare_at(vhost.url, topology_of())


async def test_a_queue_that_one_connection_has_to_itself_is_refused(vhost: VirtualHost) -> None:
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare("billing", exclusive=True)
        with pytest.raises(ConfigurationError, match="'billing' belongs to one connection alone"):
            await declare_at(vhost.url, topology_of())


async def test_a_queue_that_is_merely_weaker_is_used_as_it_is(vhost: VirtualHost) -> None:
    dead_letters: FieldTable = {"x-dead-letter-exchange": "outbox.dlx", "x-dead-letter-routing-key": "billing"}
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare("billing", durable=True, arguments=QUORUM | dead_letters)
    declared = await declare_at(vhost.url, topology_of())
    assert {str(each) for each in declared.weaker} == {
        "the queue 'billing' has no x-dead-letter-strategy instead of x-dead-letter-strategy='at-least-once'",
        "the queue 'billing' has no x-overflow instead of x-overflow='reject-publish'",
    }
    assert declared.configures
    assert ("outbox", "billing") in {(each["source"], each["destination"]) for each in vhost.bindings()}


async def test_where_replicas_live_is_the_operators_choice(vhost: VirtualHost) -> None:
    billing = next(queue for queue in topology_of().queues if queue.name == "billing")
    chosen: FieldTable = {
        "x-quorum-initial-group-size": 1,
        "x-queue-leader-locator": "balanced",
        "x-single-active-consumer": True,
    }
    async with channel_to(vhost.url) as channel:
        await channel.queue_declare("billing", durable=True, arguments=arguments_of(billing) | chosen)
    assert await declare_at(vhost.url, topology_of()) == Declared(configures=True, dead_letters=True)


# Whoever may not configure.


@pytest.mark.parametrize(
    ("permissions", "dead_letters"), [(LEAST, True), (OFFERED_BEFORE, False)], ids=["least", "offered before"]
)
async def test_a_user_that_may_not_declare_starts_on_what_another_declared(
    vhost: VirtualHost, permissions: dict[str, str], dead_letters: bool
) -> None:
    await declare_at(vhost.url, topology_of())
    declared = await declare_at(vhost.url_of_user(**permissions), topology_of())
    assert declared == Declared(configures=False, dead_letters=dead_letters)


async def test_without_the_marker_a_user_that_may_not_declare_does_not_start(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.exchange_delete("outbox.topology_v1")
    with pytest.raises(ConfigurationError, match=r"no exchange 'outbox\.topology_v1'.*`outbox topology"):
        await declare_at(vhost.url_of_user(**told(vhost)), topology_of())


async def test_what_a_user_is_not_told_of_is_taken_for_there(vhost: VirtualHost) -> None:
    if vhost.server_version < (4, 3):
        pytest.skip("before 4.3 every user is told of everything")
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.exchange_delete("outbox.topology_v1")
        await channel.queue_delete("billing.dlq")
    assert not (await declare_at(vhost.url_of_user(**LEAST), topology_of())).configures


@pytest.mark.parametrize("name", ["outbox", "outbox.dlx", "outbox.delay_10s"])
async def test_a_missing_exchange_is_named_with_what_to_do(vhost: VirtualHost, name: str) -> None:
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.exchange_delete(name)
    with pytest.raises(ConfigurationError, match=f"lacks exchange '{re.escape(name)}', .*`outbox topology"):
        await declare_at(vhost.url_of_user(**told(vhost)), topology_of())


@pytest.mark.parametrize("name", ["billing", "billing.dlq", "outbox.delay_10s"])
async def test_a_missing_queue_is_named_with_what_to_do(vhost: VirtualHost, name: str) -> None:
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.queue_delete(name)
    with pytest.raises(ConfigurationError, match=f"lacks queue '{re.escape(name)}', .*`outbox topology"):
        await declare_at(vhost.url_of_user(**told(vhost)), topology_of())


async def test_a_delay_that_nobody_provisioned_is_named_with_what_to_do(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    later = Listener("order.*", print, queue="billing", retry_delays=(5, 15))
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(vhost.url_of_user(**LEAST), topology_of(later))
    for name in ("outbox.delay_5s", "outbox.delay_15s"):
        assert f"exchange {name!r}" in str(refused.value)
        assert f"queue {name!r}" in str(refused.value)


async def test_nothing_at_all_is_told_at_once(vhost: VirtualHost) -> None:
    topology = topology_of()
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(vhost.url_of_user(**told(vhost)), topology)
    for name in [*(exchange.name for exchange in topology.exchanges), *(queue.name for queue in topology.queues)]:
        assert repr(name) in str(refused.value)


async def test_a_delay_that_may_not_be_written_to_is_named_with_the_permission_that_is_missing(
    vhost: VirtualHost,
) -> None:
    await declare_at(vhost.url, topology_of())
    url = vhost.url_of_user(write=r"^(outbox|outbox\.dlx|outbox\.delay_100ms)$", read=".*")
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(url, topology_of())
    assert "may not publish to exchange 'outbox.delay_10s'" in str(refused.value)
    assert r"^(outbox\.delay_10s)$" in str(refused.value)
    assert "100ms" not in str(refused.value)


async def test_a_queue_that_may_not_be_read_is_named_with_the_permission_that_is_missing(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    with pytest.raises(ConfigurationError) as refused:
        await declare_at(vhost.url_of_user(write=LEAST["write"], read="^billing$"), topology_of())
    assert "may not consume from queue 'shipping': give it a read permission that matches ^(shipping)$" in str(
        refused.value
    )


async def test_asking_whether_a_queue_may_be_read_takes_nothing_from_it(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    async with channel_to(vhost.url) as channel:
        await channel.confirm_delivery()
        await channel.basic_publish(b"untouched", exchange="outbox", routing_key="order.changed")
        await declare_at(vhost.url_of_user(**LEAST), topology_of())
        message = await channel.basic_get("billing", no_ack=True)
        assert message.body == b"untouched"
        assert not message.redelivered
        assert (message.header.properties.headers or {}).get("x-delivery-count", 0) == 0


async def test_a_user_that_may_make_queues_but_not_bind_them_needs_somebody_who_did(vhost: VirtualHost) -> None:
    url = vhost.url_of_user(configure=".*", write=r"^(outbox\..*|amq\.default)$", read="^(billing|shipping|outbox).*$")
    with pytest.raises(ConfigurationError, match=r"no exchange 'outbox\.topology_v1'"):
        await declare_at(url, topology_of())
    await declare_at(vhost.url, topology_of())
    assert not (await declare_at(url, topology_of())).configures


async def test_delays_that_a_function_decides_are_needed_at_start_by_those_who_may_not_make_them(
    vhost: VirtualHost,
) -> None:
    computed = Listener("order.*", print, queue="billing", retry_delays=lambda attempt_count, error: attempt_count)
    default = RetryPolicy.sequence(())
    async with connected(vhost.url) as open_channel:
        topology, declared = await declare_for(open_channel, NAMES, [computed], default)
        assert (topology.delays, declared.configures) == ((), True)
    async with connected(vhost.url_of_user(**LEAST)) as restricted:
        with pytest.raises(ConfigurationError, match=r"outbox\.delay_5s"):
            await declare_for(restricted, NAMES, [computed], default)
        await declare_at(vhost.url, Topology.of(NAMES, [computed], (), steps=True))
        topology, declared = await declare_for(restricted, NAMES, [computed], default)
        assert "outbox.delay_5s" in topology.delays
        assert not declared.configures


# A relay.


async def test_a_relay_makes_its_exchange_or_finds_it(vhost: VirtualHost) -> None:
    relay = vhost.url_of_user(write="^outbox$")
    with pytest.raises(ConfigurationError, match="lacks exchange 'outbox'"):
        await declare_at(relay, Topology.of_relay(NAMES))
    assert (await declare_at(vhost.url, Topology.of_relay(NAMES))).configures
    assert not (await declare_at(relay, Topology.of_relay(NAMES))).configures
    assert set(vhost.exchanges()) == {"outbox"}


async def test_a_relay_that_may_not_publish_is_told_so_at_start(vhost: VirtualHost) -> None:
    await declare_at(vhost.url, topology_of())
    with pytest.raises(ConfigurationError, match=r"may not publish to exchange 'outbox': .*write permission"):
        await declare_at(vhost.url_of_user(**LEAST), Topology.of_relay(NAMES))
