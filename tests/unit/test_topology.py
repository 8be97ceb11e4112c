"""RabbitMQ's topology: the names, arguments and order of what listeners need."""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from outbox import ConfigurationError, Listener, RetryPolicy
from outbox.core.durations import parse_duration
from outbox.transports.rabbitmq.topology import (
    LONGEST_DELAY,
    STEPS,
    Exchange,
    Names,
    Queue,
    QueueBinding,
    Topology,
    open_ended,
    server_version,
    step,
)

DEFAULT = (timedelta(seconds=1), timedelta(seconds=10))
DELAYS = st.timedeltas(min_value=timedelta(0), max_value=LONGEST_DELAY)


def listener(queue: str = "billing", binding_key: str = "order.*", **options: Any) -> Listener:
    return Listener(binding_key, print, queue=queue, **options)


def topology_of(*listeners: Listener, delays: Sequence[timedelta] = DEFAULT, **options: Any) -> Topology:
    return Topology.of(Names(), listeners, delays, **options)


def test_a_listener_gets_a_queue_its_dead_letters_and_its_delays() -> None:
    topology = topology_of(listener(), delays=[timedelta(seconds=10)])
    handed_on = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    assert topology.exchanges == (
        Exchange("outbox", "topic"),
        Exchange("outbox.dlx", "direct"),
        Exchange("outbox.delay_10s", "fanout"),
    )
    assert topology.queues == (
        Queue("billing.dlq", {"x-queue-type": "quorum"}),
        Queue(
            "billing",
            {
                "x-queue-type": "quorum",
                "x-dead-letter-exchange": "outbox.dlx",
                "x-dead-letter-routing-key": "billing",
                **handed_on,
            },
        ),
        Queue(
            "outbox.delay_10s",
            {"x-queue-type": "quorum", "x-message-ttl": 10_000, "x-dead-letter-exchange": "", **handed_on},
        ),
    )
    assert topology.bindings == (
        QueueBinding("outbox.dlx", "billing.dlq", "billing"),
        QueueBinding("outbox.delay_10s", "outbox.delay_10s", ""),
        QueueBinding("outbox", "billing", "order.*"),
    )
    assert topology.marker == Exchange("outbox.topology_v1", "direct")


def test_listeners_share_the_delays_that_they_have_in_common() -> None:
    topology = topology_of(
        listener("a"), listener("b", retry_delays=(10, 60)), listener("c", retry_delays=()), listener("d")
    )
    assert topology.delays == ("outbox.delay_1s", "outbox.delay_10s", "outbox.delay_60s")


def test_nobody_needs_a_delay_that_every_listener_overrides() -> None:
    assert topology_of(listener(retry_delays=(5,))).delays == ("outbox.delay_5s",)


def test_listeners_without_a_delay_have_a_way_back_to_their_queues_where_it_is_wanted() -> None:
    names = Names()
    assert topology_of(listener(retry_delays=())).delays == ()
    assert Topology.of(names, [listener(retry_delays=())], (), way_back=True).delays == ("outbox.delay_1s",)
    assert Topology.of(names, [listener(retry_delays=(7,))], (), way_back=True).delays == ("outbox.delay_7s",)


def test_delays_that_a_function_decides_are_left_out_unless_every_step_is_asked_for() -> None:
    computed = listener(retry_delays=lambda attempt_count, error: 7)
    assert topology_of(computed).delays == ()
    assert topology_of(computed, steps=True).delays == tuple(Names().delay(each) for each in STEPS)


def test_delays_that_differ_by_less_than_a_millisecond_are_one() -> None:
    delays = [timedelta(microseconds=1), timedelta(microseconds=2)]
    assert topology_of(listener(), delays=delays).delays == ("outbox.delay_1ms",)


def test_a_retry_waits_as_long_as_it_wants_where_there_is_a_queue_for_that_and_a_step_otherwise() -> None:
    topology = topology_of(listener(retry_delays=(7, 61)))
    wanted = [7, 61, 6, 8, 61.5]
    assert [topology.delay(timedelta(seconds=each)).total_seconds() for each in wanted] == [7, 61, 10, 10, 120]
    assert topology.delay(timedelta(days=365)) == STEPS[-1]


def test_a_relay_needs_no_more_than_an_exchange_to_publish_to() -> None:
    topology = Topology.of_relay(Names("shop"))
    assert (topology.exchanges, topology.publishes) == ((Exchange("shop", "topic"),), ("shop",))
    assert (topology.queues, topology.bindings, topology.marker) == ((), (), None)


@pytest.mark.parametrize(
    ("text", "version"), [("3.10.8", (3, 10, 8)), ("4.1.0-rc.1", (4, 1, 0)), ("4", (4,)), ("", None), ("main", None)]
)
def test_a_servers_version_is_read_from_what_it_says(text: str, version: Any) -> None:
    assert server_version(text) == version


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ((1, 2), False),
        (RetryPolicy.exponential(cap=60), False),
        (None, True),
        (RetryPolicy.constant(1, jitter=1), True),
    ],
)
def test_a_listener_is_open_ended_if_its_delays_cannot_be_listed(policy: Any, expected: bool) -> None:
    default = RetryPolicy.calling(lambda attempt_count, error: 1)
    assert open_ended(listener(retry_delays=policy), default) is expected


@pytest.mark.parametrize(
    ("version", "limited"), [(None, False), ((3, 10, 8), False), ((3, 13), False), ((4,), True), ((4, 1, 2), True)]
)
def test_only_a_server_that_limits_deliveries_by_default_is_told_not_to(version: Any, limited: bool) -> None:
    queues = {queue.name: queue.arguments for queue in topology_of(listener(), server_version=version).queues}
    expected = -1 if limited else None
    assert queues["billing"].get("x-delivery-limit") == expected
    assert queues["billing.dlq"].get("x-delivery-limit") == expected
    assert "x-delivery-limit" not in queues["outbox.delay_1s"]


def test_everything_is_named_after_the_exchange_and_queues_begin_with_the_prefix() -> None:
    topology = Topology.of(Names("shop", "eu."), [listener()], DEFAULT)
    assert {exchange.name for exchange in topology.exchanges} == {
        "shop",
        "shop.dlx",
        "shop.delay_1s",
        "shop.delay_10s",
    }
    assert [queue.name for queue in topology.queues][:2] == ["eu.billing.dlq", "eu.billing"]
    assert topology.queues[1].arguments["x-dead-letter-routing-key"] == "eu.billing"
    assert topology.bindings[0] == QueueBinding("shop.dlx", "eu.billing.dlq", "eu.billing")
    assert topology.bindings[-1] == QueueBinding("shop", "eu.billing", "order.*")


@pytest.mark.parametrize(
    ("delay", "name"),
    [
        (0, "0s"),
        (0.5, "500ms"),
        (1, "1s"),
        (1.5, "1500ms"),
        (90, "90s"),
        (300, "300s"),
        (3599, "3599s"),
        (3600, "1h"),
        (5400, "1h30m"),
        (3600.5, "1h500ms"),
        (86_400, "1d"),
        (0.000_001, "1ms"),  # never shorter than it was asked for
    ],
)
def test_a_delays_name_says_how_long_it_is(delay: float, name: str) -> None:
    assert Names().delay(timedelta(seconds=delay)) == f"outbox.delay_{name}"


@given(DELAYS)
def test_a_delays_name_reads_as_the_time_that_its_queue_holds_messages(delay: timedelta) -> None:
    [queue] = Topology.of_delay(Names(), delay).queues
    time_to_live = timedelta(milliseconds=queue.arguments["x-message-ttl"])  # type: ignore[arg-type]
    assert abs(parse_duration(queue.name.removeprefix("outbox.delay_")) - time_to_live) < timedelta(microseconds=10)
    assert timedelta(0) <= time_to_live - delay < timedelta(milliseconds=1)


@given(DELAYS)
def test_a_step_is_not_shorter_than_what_was_asked_for(delay: timedelta) -> None:
    found = step(delay)
    assert found in STEPS
    assert found >= min(delay, STEPS[-1])
    assert found == STEPS[0] or STEPS[STEPS.index(found) - 1] < delay


def test_a_delay_that_rabbitmq_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="49d"):
        topology_of(listener(retry_delays=(timedelta(days=60),)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Names(""),
        lambda: Names("amq.topic"),
        lambda: Names("x" * 104),
        lambda: Names("two\nlines"),
        lambda: Names("outbox", "amq."),
        lambda: Names("outbox", "x" * 250).queue("billing"),
        lambda: Names().queue("x" * 252),
        lambda: Names().queue("amq.billing"),
    ],
)
def test_names_that_rabbitmq_would_refuse_are_refused_before_it_is_asked(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_the_longest_names_fit() -> None:
    names = Names("x" * 103)
    assert len(names.delay(LONGEST_DELAY - timedelta(days=26))) <= 127
    assert len(names.dead_letter_queue(names.queue("x" * 251))) == 255


@pytest.mark.parametrize("character", [*map(chr, range(32, 127)), "ä"])
def test_names_have_the_characters_that_the_client_takes(character: str) -> None:
    name = f"module.{character}"
    expected = _takes(lambda: commands.Queue.Declare(queue=name))
    assert _takes(lambda: commands.Exchange.Declare(exchange=name)) == expected
    assert _takes(lambda: Names(name)) == expected
    assert _takes(lambda: Names().queue(name)) == expected


def _takes(make: Callable[[], object]) -> bool:
    try:
        make()
    except (ValueError, ConfigurationError):
        return False
    return True


@pytest.mark.parametrize("queue", ["billing.dlq", "outbox.delay_1s", "billing"])
def test_a_listeners_queue_cannot_take_a_name_that_is_needed(queue: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(queue)):
        topology_of(listener(), listener(queue))
