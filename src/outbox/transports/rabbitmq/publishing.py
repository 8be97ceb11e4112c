"""BatchPublisher: batches on one channel, an answer for each message. One that is bad is found and left out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from outbox.core.errors import TransportUnavailable
from outbox.core.transport import Refusal
from outbox.transports.rabbitmq.channel import BrokerConnection, Channel, Ended, Lost
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.connection import SupervisedConnection, blocked

PUBLISHER_CLOSED_WITHIN = 5.0  # seconds
SEARCH_AGAIN = 0.1  # seconds between two tries to find a connection that a bad message closed
FRAME_AROUND = 20  # bytes of a header frame that are no properties
CONFIRMED_WITHIN = 20.0  # seconds for the answers to a batch; then the channel is given up

Result = BrokerAnswer | Refusal

# What the broker says when it closes a channel over an exchange, and not over the message.
_EXCHANGE = re.compile(r"(?:no exchange|access to exchange) '(?P<name>.*?)' in vhost")
_NOT_FOUND, _ACCESS_REFUSED, _PRECONDITION_FAILED = 404, 403, 406
# These may be the doing of one message: too large, a header it cannot read, a topic that is not allowed.
# The client library goes on writing to a channel that was closed over one, and that is a channel error.
_CHANNEL_ERROR = 504
_MESSAGES_FAULT = frozenset({311, _ACCESS_REFUSED, _PRECONDITION_FAILED, 501, 502, _CHANNEL_ERROR, 505})
_CONNECTIONS = 500  # codes from here on close a connection


class BatchPublisher:
    """Any number of batches at once on the current connection's channel."""

    def __init__(self, supervised: SupervisedConnection, *, within: float = CONFIRMED_WITHIN) -> None:
        self._supervised = supervised
        self._within = within
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._searching = asyncio.Lock()

    async def publish(self, batch: Sequence[Outgoing]) -> list[Result]:
        """What became of each. Raises TransportUnavailable if nothing was sent."""
        until = asyncio.get_running_loop().time() + self._within
        connection = await self._unblocked()
        largest = connection.frame_max - FRAME_AROUND
        if any(len(outgoing.properties) > largest for outgoing in batch):
            return await self._those_that_fit(batch, largest)
        channel = await self._ready(connection)
        try:
            answers: list[Result] = list(await channel.publish(batch, self._within))
        except Lost as error:
            raise TransportUnavailable(f"RabbitMQ is away: {error}") from error
        unknown = [position for position, answer in enumerate(answers) if answer is BrokerAnswer.UNKNOWN]
        if unknown and channel.ended.done() and _can_be_told_apart(channel.ended.result()):
            search = _Search(self._private_channel, batch, answers, until)
            async with self._searching:  # two at once would close each other's connections
                await search.over(unknown, channel.ended.result())
        return answers

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PUBLISHER_CLOSED_WITHIN):
                    await channel.close()

    async def _those_that_fit(self, batch: Sequence[Outgoing], largest: int) -> list[Result]:
        """The others would cost the connection."""
        fitting = [outgoing for outgoing in batch if len(outgoing.properties) <= largest]
        results = iter(await self.publish(fitting) if fitting else [])
        too_large = Refusal(f"its headers are larger than RabbitMQ takes, {largest} bytes", permanent=True)
        return [next(results) if len(outgoing.properties) <= largest else too_large for outgoing in batch]

    async def _ready(self, connection: BrokerConnection) -> Channel:
        """The shared channel, opened anew after its end or its connection's."""
        if self._channel is None or self._channel.ended.done():
            async with self._opening:
                if self._channel is None or self._channel.ended.done():
                    self._channel = await _open(connection)
        return self._channel

    async def _private_channel(self) -> Channel:
        return await _open(await self._unblocked())

    async def _unblocked(self) -> BrokerConnection:
        connection = await self._supervised.connection()
        reason = await connection.blocked()
        if reason is not None:
            raise blocked(reason)
        return connection


class _Search:
    """Publishes the unanswered part of a batch again, in ever smaller parts, until what is bad stands alone.

    On channels of its own: what closes them closes no others.
    """

    def __init__(
        self,
        open_channel: Callable[[], Awaitable[Channel]],
        batch: Sequence[Outgoing],
        answers: list[Result],
        until: float,
    ) -> None:
        self._open = open_channel
        self._batch = batch
        self._answers = answers
        self._until = until
        self._channel: Channel | None = None
        self._blamed: set[int] = set()

    async def over(self, positions: list[int], ended: Ended) -> None:
        """`ended` is the end of a channel that others used too: it tells of exchanges, and of no single message."""
        alone = len(positions) == 1 and _EXCHANGE.search(ended.text) is None
        parts = [positions] if alone else self._without_fault(positions, ended)
        try:
            while parts:
                part = parts.pop()
                left = self._until - asyncio.get_running_loop().time()
                if left <= 0:
                    return
                try:
                    ended = await self._send(part, left)
                except (TransportUnavailable, Lost):
                    parts.append(part)
                    await asyncio.sleep(SEARCH_AGAIN)
                    continue
                unknown = [position for position in part if self._answers[position] is BrokerAnswer.UNKNOWN]
                if unknown:
                    if not _can_be_told_apart(ended):
                        return
                    parts += self._without_fault(unknown, ended)
        finally:
            if self._channel is not None:
                await self._channel.close()

    async def _send(self, part: list[int], within: float) -> Ended:
        if self._channel is None or self._channel.ended.done():
            self._channel = await self._open()
        answers = await self._channel.publish([self._batch[position] for position in part], within)
        for position, answer in zip(part, answers, strict=True):
            self._answers[position] = answer
        return self._channel.ended.result() if self._channel.ended.done() else Ended("")

    def _without_fault(self, positions: list[int], ended: Ended) -> list[list[int]]:
        """What is worth another try, in parts that are smaller or free of what was named."""
        exchange = _EXCHANGE.search(ended.text)
        if exchange is not None:
            answer = BrokerAnswer.MISSING if ended.code == _NOT_FOUND else BrokerAnswer.FORBIDDEN
            named = _named(exchange["name"])
            for position in positions:
                if self._batch[position].exchange == named:
                    self._answers[position] = answer
            rest = [position for position in positions if self._answers[position] is BrokerAnswer.UNKNOWN]
            return [rest] if rest and len(rest) < len(positions) else []
        if len(positions) == 1:
            [position] = positions
            if ended.code is not None and ended.code >= _CONNECTIONS and position not in self._blamed:
                self._blamed.add(position)  # another message may have closed the connection
                return [positions]
            if ended.code != _CHANNEL_ERROR:
                self._answers[position] = Refusal(ended.text, permanent=ended.code != _ACCESS_REFUSED)
            return []
        middle = len(positions) // 2
        return [positions[middle:], positions[:middle]]


def _can_be_told_apart(ended: Ended) -> bool:
    return ended.code in _MESSAGES_FAULT or (ended.code == _NOT_FOUND and _EXCHANGE.search(ended.text) is not None)


def _named(exchange: str) -> str:
    return "" if exchange == "amq.default" else exchange


async def _open(connection: BrokerConnection) -> Channel:
    try:
        return await connection.channel()
    except (Lost, TimeoutError) as error:
        raise TransportUnavailable(f"RabbitMQ opens no channel: {str(error) or 'no answer'}") from error
