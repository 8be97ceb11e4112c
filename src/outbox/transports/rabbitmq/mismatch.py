"""Mismatch: what exists at the broker beside what is wanted there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from outbox.transports.rabbitmq.topology import Exchange, Queue

_LIMIT, _LIMIT_BY_POLICY = "x-delivery-limit", "delivery-limit"
_USUAL_LIMIT = 20  # of RabbitMQ from 4.0 on, where neither says another one
# Without these a queue works, and a crash of the broker or of workers may cost what it need not.
_WEAKER = frozenset({"x-dead-letter-strategy", "x-overflow", _LIMIT})
# Where replicas live, who consumes first and how long it may take is the operator's choice.
_HARMLESS = frozenset(
    {
        "x-queue-leader-locator",
        "x-quorum-initial-group-size",
        "x-quorum-target-group-size",
        "x-max-in-memory-bytes",
        "x-max-in-memory-length",
        "x-single-active-consumer",
        "x-consumer-timeout",
    }
)


class Severity(Enum):
    """What follows from a mismatch."""

    WRONG = "messages would not go where they should"
    WEAKER = "it works, and a crash may cost more than it need"
    HARMLESS = "the operator's choice"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An argument with which something exists, beside the one that is wanted."""

    what: str  # "queue" or "exchange"
    name: str
    argument: str
    there: object  # None: it is not set
    wanted: object

    @property
    def weight(self) -> Severity:
        if self.argument in _HARMLESS:
            return Severity.HARMLESS
        return Severity.WEAKER if self.argument in _WEAKER else Severity.WRONG

    @property
    def way_out(self) -> str:
        """How to get rid of what exists: a broker does not change it."""
        if self.what == "queue":
            return f"rabbitmqctl delete_queue {self.name}"
        return f"the exchange {self.name}, in the management interface"

    @property
    def way_out_beside_messages(self) -> str | None:
        """How to mend it while the queue is in use, if there is a way."""
        if self.argument != _LIMIT or self.there is not None:
            return None
        definition = json.dumps({_LIMIT_BY_POLICY: -1})
        return f"rabbitmqctl set_policy --apply-to queues {self.name}-limit '^{re.escape(self.name)}$' '{definition}'"

    @property
    def consequence(self) -> str:
        """What may happen, where it is used as it is."""
        if self.argument != _LIMIT:
            return "a broker that crashes may lose a message there"
        limit = self.there if isinstance(self.there, int) else _USUAL_LIMIT
        return (
            f"RabbitMQ dead-letters a message there that came back more than {limit} times, as with {limit + 1} lost "
            "connections, although nothing failed"
        )

    @property
    def advice(self) -> str:
        """The same with what to do."""
        mending = self.way_out_beside_messages
        way_out = f"When it is empty: {self.way_out}"
        if mending is not None:
            way_out = f"A policy mends it while it is in use, and AMQP does not tell whether there is one: {mending}"
        return f"{self}: {self.consequence}. {way_out}"

    def __str__(self) -> str:
        return f"the {self.what} {self.name!r} has {self._told(self.there)} instead of {self._told(self.wanted)}"

    def _told(self, value: object) -> str:
        return f"no {self.argument}" if value is None else f"{self.argument}={value!r}"


def compare_exchange(exchange: Exchange, kind: str) -> Iterator[Mismatch]:
    if kind != exchange.kind:
        yield Mismatch("exchange", exchange.name, "type", kind, exchange.kind)


def compare_queue(
    queue: Queue, arguments: Mapping[str, object], *, durable: bool, policy: Mapping[str, object]
) -> Iterator[Mismatch]:
    """The policy is what applies to the queue, whatever set it."""
    if not durable:
        yield Mismatch("queue", queue.name, "durable", False, True)
    for argument in sorted({*queue.arguments, *arguments}):
        there, wanted = arguments.get(argument), queue.arguments.get(argument)
        if argument == _LIMIT and there is None:
            there = policy.get(_LIMIT_BY_POLICY)
        if there != wanted:
            yield Mismatch("queue", queue.name, argument, there, wanted)
