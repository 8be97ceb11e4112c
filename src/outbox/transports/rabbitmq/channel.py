"""Channels: what publishing and consuming ask of a connection. Hand-written frames and the client library answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiormq.abc import AbstractChannel

from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing

_WITH_TIMEOUT = (4, 3)  # RabbitMQ, from which on a consumer timeout cancels the consumer; before, it closes the channel
_CANCELLED = "the broker cancelled the consumer: its queue was deleted, or moves to another node"
_CANCELLED_OR_LATE = (
    "the broker cancelled the consumer: a message was not acknowledged within the consumer timeout, or its queue was "
    "deleted, or moves to another node"
)
CANCELLATIONS = (_CANCELLED, _CANCELLED_OR_LATE)
_WITH_ACQUIRED = (4, 3)  # RabbitMQ, from which on it writes `x-acquired-count`, over whatever a publisher wrote there


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a channel or a connection is gone. Without a code it was cut, or closed by us."""

    text: str
    code: int | None = None


@dataclass(slots=True, eq=False)
class Incoming:
    """One delivery as it came."""

    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    consumer_tag: str
    properties: bytes = b""
    body: bytes = b""


class Lost(Exception):
    """The channel or the connection ended."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.text)
        self.ended = ended


class Channel(Protocol):
    """One channel, from its opening to its end. After that nothing is sent on it."""

    @property
    def ended(self) -> asyncio.Future[Ended]:
        """Done when the channel is gone."""
        ...

    @property
    def server_version(self) -> tuple[int, ...] | None: ...

    async def publish(self, batch: Sequence[Outgoing], within: float) -> list[BrokerAnswer]:
        """Write a batch and wait for an answer to each message. Where none came the channel has ended, by then at last.

        Raises Lost if the channel had ended before: nothing was sent.
        """
        ...

    async def consume(self, queue: str, prefetch: int, taken: Callable[[Incoming], object]) -> None:
        """Begin to take deliveries, or more of them, or anew after a cancel; raises Lost if the broker refuses.

        A consumer that the broker cancels ends the channel.
        """
        ...

    async def cancel(self) -> None:
        """Take no more; what is already here stays unsettled."""
        ...

    def settle(self, acks: Sequence[tuple[int, bool]], nacks: Sequence[tuple[int, bool]] = ()) -> None:
        """Acknowledge (tag, with all before it) and give back (tag, to its queue or to its dead letters)."""
        ...

    async def heard(self) -> None:
        """Wait until the broker has read everything that was written; raises Lost."""
        ...

    def retire(self, reason: str) -> None:
        """End it at once, without waiting for anybody."""
        ...

    async def close(self) -> None:
        """End it when the broker has read everything that was written."""
        ...


class BrokerConnection(Protocol):
    """One connection, from its opening to its end."""

    @property
    def ended(self) -> asyncio.Future[Ended]: ...

    on_blocked: Callable[[str], object]  # told why, in the moment in which the broker stops to take publishes
    on_unblocked: Callable[[], object]  # the same when it takes them again

    @property
    def server_version(self) -> tuple[int, ...] | None: ...

    @property
    def frame_max(self) -> int:
        """Bytes of the largest frame that the broker takes: to a larger one it answers by closing the connection."""
        ...

    async def blocked(self) -> str | None:
        """Why the broker takes no publishes at the moment, if it does not."""
        ...

    async def channel(self) -> Channel:
        """A new channel with confirms; raises Lost."""
        ...

    async def client_channel(self) -> AbstractChannel:
        """A channel of the client library, for declaring."""
        ...

    async def close(self) -> None: ...


def cancelled(server_version: tuple[int, ...] | None) -> str:
    """Why a broker of this version cancels a consumer."""
    return _CANCELLED_OR_LATE if _is_at_least(_WITH_TIMEOUT, server_version) else _CANCELLED


def counts_acquired(server_version: tuple[int, ...] | None) -> bool:
    """Whether a broker of this version counts in `x-acquired-count` how often a message was delivered."""
    return _is_at_least(_WITH_ACQUIRED, server_version)


def _is_at_least(least: tuple[int, ...], server_version: tuple[int, ...] | None) -> bool:
    return server_version is not None and server_version >= least
