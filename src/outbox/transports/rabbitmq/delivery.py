"""RabbitmqDelivery: an attempt that a channel holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Protocol

import aio_pika
from aiormq.abc import DeliveredMessage
from pamqp import commands
from pamqp.header import ContentHeader

from outbox.core.attempt import Attempt, Dead, Outcome
from outbox.core.errors import Undecodable
from outbox.core.message import BYTES, Message, new_id
from outbox.core.settlement import Settlement
from outbox.core.transport import Delivery
from outbox.transports.rabbitmq.channel import Incoming
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.poison import Key


class Holder(Protocol):
    """What holds deliveries until they are settled, or their channel is gone."""

    @property
    def queue(self) -> str: ...

    @property
    def isolation_queue(self) -> str | None: ...

    def settle(self, delivery: RabbitmqDelivery, outcome: Outcome, settlement: Settlement) -> None: ...

    async def isolate(self, delivery: RabbitmqDelivery) -> RabbitmqDelivery | None:
        """Publish it anew for an isolated run, and wait for the copy."""
        ...

    async def isolation_ended(self, delivery: RabbitmqDelivery) -> None:
        """Wait until the broker knows how an isolated run ended."""
        ...


class DeliveryReceiver(Protocol):
    """Who gets what a channel delivered."""

    def ready(self, delivery: RabbitmqDelivery) -> None: ...

    def refused(self, attempt: Attempt, dead: Dead, settlement: Settlement | None = None) -> None:
        """Tell of a message that no listener was called for."""
        ...

    def when_prepared(self, line_up: Callable[[], None]) -> None:
        """Make the queue for isolated runs, and then let a suspected message wait for its run."""
        ...

    async def isolation_queue_name(self) -> str | None: ...

    def lost(self, holder: Holder, handed_on: Iterable[RabbitmqDelivery]) -> None:
        """What came by this channel comes again by another; of these it was not said yet how they ended."""
        ...


class RabbitmqDelivery(Delivery):
    """An attempt that a channel holds."""

    __slots__ = ("envelope", "holder", "incoming", "is_lost", "is_settled")

    is_lost: bool

    def __init__(self, attempt: Attempt, envelope: Envelope, incoming: Incoming, holder: Holder) -> None:
        self.attempt = attempt
        self.envelope = envelope
        self.incoming = incoming
        self.holder = holder
        self.is_settled = False
        self.is_lost = False  # with its channel

    @property
    def raw(self) -> aio_pika.IncomingMessage:
        """Built for those who ask for it. It cannot be acknowledged by hand: its end is its listener's.

        Raises Undecodable: the client library cannot read everything that can be read here.
        """
        incoming = self.incoming
        header = ContentHeader()
        try:
            header.unmarshal(b"\x00" * 12 + incoming.properties)
        except Exception as error:
            raise Undecodable(f"its properties cannot be read by pamqp: {type(error).__name__}: {error}") from error
        deliver = commands.Basic.Deliver(
            incoming.consumer_tag, incoming.tag, incoming.redelivered, incoming.exchange, incoming.routing_key
        )
        message = DeliveredMessage(delivery=deliver, header=header, body=incoming.body, channel=None)  # type: ignore[arg-type]
        return aio_pika.IncomingMessage(message, no_ack=True)

    async def start(self) -> RabbitmqDelivery | None:
        return self if self.on_trial else await self.holder.isolate(self)

    async def settled(self) -> None:
        await self.holder.isolation_ended(self)

    def settle(self, outcome: Outcome) -> Settlement:
        settlement = Settlement()
        if self.is_settled:
            settlement.cancel()
            return settlement
        self.is_settled = True
        self.holder.settle(self, outcome, settlement)
        return settlement

    @property
    def on_trial(self) -> bool:
        return self.holder.isolation_queue is not None or self.envelope.on_trial

    @property
    def key(self) -> Key:
        return self.holder.queue, self.attempt.message.id

    @property
    def expired(self) -> bool:
        expires_at = self.attempt.message.expires_at
        return expires_at is not None and expires_at <= datetime.now(UTC)


def unread(incoming: Incoming, envelope: Envelope | None = None) -> Attempt:
    """What stands for a message whose headers cannot be read."""
    message_id = (envelope.text("message_id") if envelope else None) or new_id()
    message = Message(
        routing_key=incoming.routing_key, body=incoming.body, content_type=BYTES, tracking_ids=(message_id,)
    )
    return Attempt(message, 1, incoming.tag)
