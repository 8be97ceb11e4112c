"""Mismatch: what exists at the broker beside what is wanted there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from outbox.transports.rabbitmq.topology import Exchange, Queue

# Without these a queue works, and a crash of the broker or of workers may cost what it need not.
_WEAKER = frozenset({"x-dead-letter-strategy", "x-overflow", "x-delivery-limit"})
# Where replicas live and who consumes first is the operator's choice.
_HARMLESS = frozenset(
    {
        "x-queue-leader-locator",
        "x-quorum-initial-group-size",
        "x-quorum-target-group-size",
        "x-max-in-memory-bytes",
        "x-max-in-memory-length",
        "x-single-active-consumer",
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

    def __str__(self) -> str:
        return f"the {self.what} {self.name!r} has {self._told(self.there)} instead of {self._told(self.wanted)}"

    def _told(self, value: object) -> str:
        return f"no {self.argument}" if value is None else f"{self.argument}={value!r}"


def compare_exchange(exchange: Exchange, kind: str) -> Iterator[Mismatch]:
    if kind != exchange.kind:
        yield Mismatch("exchange", exchange.name, "type", kind, exchange.kind)


def compare_queue(queue: Queue, arguments: Mapping[str, object], *, durable: bool) -> Iterator[Mismatch]:
    if not durable:
        yield Mismatch("queue", queue.name, "durable", False, True)
    for argument in sorted({*queue.arguments, *arguments}):
        there, wanted = arguments.get(argument), queue.arguments.get(argument)
        if there != wanted:
            yield Mismatch("queue", queue.name, argument, there, wanted)
