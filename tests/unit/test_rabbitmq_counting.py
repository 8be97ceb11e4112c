"""Messages in RabbitMQ's queues, as its answers tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiormq
import pytest

from outbox.cli.queues import queue_table
from outbox.core.store import Backlog, QueueBacklog
from outbox.core.transport import Defaults
from outbox.transports import rabbitmq
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.counting import queue_backlogs, untold
from outbox.transports.rabbitmq.declaring import ReopeningChannel
from outbox.transports.rabbitmq.management import Counts, Seen, SeenQueue
from outbox.transports.rabbitmq.topology import Names, QueueBinding

NAMES = Names()
OF_DEAD_LETTERS = QueueBinding("outbox.dlx", "orders.dlq", "orders")


class Broker:
    """The queues there are, and how many messages each holds."""

    def __init__(self, **messages: int) -> None:
        self.messages = {name.replace("__", "."): count for name, count in messages.items()}

    def asking(self) -> ReopeningChannel:
        async def channel() -> Any:
            return self

        return ReopeningChannel(channel)

    async def queue_declare(self, queue: str, passive: bool) -> aiormq.spec.Queue.DeclareOk:
        if queue not in self.messages:
            raise aiormq.exceptions.ChannelNotFoundEntity(f"no queue {queue!r}")
        return aiormq.spec.Queue.DeclareOk(queue, self.messages[queue], 0)


def seen(counts: Mapping[str, int | None]) -> Seen:
    """As the management interface tells it, of one listener's queue and of others."""
    queues = {
        name: SeenQueue({}, True, None if count is None else Counts(count, 0, 0)) for name, count in counts.items()
    }
    return Seen({}, queues, frozenset({OF_DEAD_LETTERS}))


async def test_a_delay_in_which_retries_wait_is_a_row_and_an_empty_one_is_none() -> None:
    broker = Broker(orders=1, orders__dlq=2, outbox__delay_10s=3, outbox__delay_1m=0)
    delays = ["outbox.delay_10s", "outbox.delay_1m", "outbox.delay_5m"]
    orders, waiting = await queue_backlogs(broker.asking(), NAMES, ["orders"], delays, None)
    assert (orders.queue, orders.queued, orders.retrying, orders.dead) == ("orders", 1, None, 2)
    assert (waiting.queue, waiting.transport, waiting.retrying) == ("outbox.delay_10s", "rabbitmq", 3)
    assert (waiting.queued, waiting.leased, waiting.dead) == (0, 0, 0)


async def test_the_management_interface_names_the_delays_of_functions_and_jitter() -> None:
    found = seen({"orders": 1, "orders.dlq": 0, "outbox.delay_20s": 4, "outbox.delay_2s": 0, "of others": 9})
    broker = Broker(orders=1, orders__dlq=0, outbox__delay_20s=4, outbox__delay_2s=0)
    rows = await queue_backlogs(broker.asking(), NAMES, [], ["outbox.delay_10s"], found)
    assert [(row.queue, row.queued, row.retrying) for row in rows] == [
        ("orders", 1, None),
        ("outbox.delay_20s", 0, 4),
    ]


async def test_of_what_the_broker_tells_the_management_interface_which_is_late_is_not_believed() -> None:
    """Only what workers hold is taken from it, which the broker does not tell."""
    nothing = SeenQueue({}, True, Counts(0, 3, 0))
    held = SeenQueue({}, True, Counts(9, None, 2))
    queues = {"orders": held, "orders.dlq": nothing, "outbox.delay_10s": nothing}
    broker = Broker(orders=5, orders__dlq=1, outbox__delay_10s=4)
    found = Seen({}, queues, frozenset({OF_DEAD_LETTERS}))
    orders, waiting = await queue_backlogs(broker.asking(), NAMES, [], [], found)
    assert (orders.queued, orders.leased, orders.consumers, orders.dead) == (7, 2, 0, 1)
    assert (waiting.queue, waiting.retrying) == ("outbox.delay_10s", 4)


async def test_queues_that_only_the_management_interface_knows_are_unknown_while_the_broker_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def see(*arguments: object, **options: object) -> Seen:
        return seen({"orders": None, "orders.dlq": None})  # it has no statistics yet, so the broker has to be asked

    monkeypatch.setattr(rabbitmq, "see", see)
    transport = RabbitmqTransport(
        "amqp://127.0.0.1:1/", Defaults(settings={"rabbitmq_management_url": "http://127.0.0.1:2"})
    )
    counted = await transport.counted([])
    assert counted is not None
    [orders] = counted
    assert (orders.queue, orders.queued, orders.dead) == ("orders", None, None)
    assert Backlog().beside(counted).dead is None


@pytest.mark.parametrize(
    ("at_broker", "leased"),
    [([], 1), ([2], 3), ([2, 0], 3), ([2, None], None)],
    ids=["none", "one", "two", "one untold"],
)
def test_what_workers_hold_is_counted_with_what_relays_hold_or_unknown(
    at_broker: list[int | None], leased: int | None
) -> None:
    queues = [QueueBacklog(queue=str(each), transport="rabbitmq", leased=each) for each in at_broker]
    assert Backlog(leased=1).beside(queues).leased == leased


def test_while_the_broker_is_away_the_age_of_its_oldest_message_is_unknown_too() -> None:
    [away] = untold(NAMES, ["orders"])
    empty = QueueBacklog(queue="empty", transport="rabbitmq", queued=0)
    in_database = QueueBacklog(queue="here", queued=None)
    ages = queue_table([away, empty, in_database]).columns[-1].cells
    assert [str(each) for each in ages] == ["unknown", "-", "-"]
