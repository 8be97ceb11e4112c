"""Counting: how many messages are in the queues of a broker, for processes that neither publish nor consume."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource, ChannelNotFoundEntity

from outbox.core.errors import ConfigurationError
from outbox.core.retry import RetryPolicy
from outbox.core.store import QueueBacklog
from outbox.transports.rabbitmq.channel import BrokerConnection
from outbox.transports.rabbitmq.declaring import ReopeningChannel
from outbox.transports.rabbitmq.management import Counts, Seen
from outbox.transports.rabbitmq.topology import LONGEST_DELAY, Names

COUNT_WITHIN = 3.0  # seconds for all queues together
COUNTING_CLOSED_WITHIN = 0.5  # seconds

NAME = "rabbitmq"

_UNTOLD = Counts(None, None)


class Counting:
    """A connection for any number of counts. A broker with an alarm does not answer on one that has published."""

    def __init__(self, connect: Callable[[], Awaitable[BrokerConnection]]) -> None:
        self._connect = connect
        self._connection: BrokerConnection | None = None

    async def channel(self) -> AbstractChannel:
        if self._connection is None or self._connection.ended.done():
            self._connection = await self._connect()
        return await self._connection.client_channel()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                async with asyncio.timeout(COUNTING_CLOSED_WITHIN):
                    await connection.close()


def of_listeners(names: Names, recorded: Iterable[str]) -> set[str]:
    """Those of the recorded queues that may be at this broker."""
    return {queue for queue in recorded if queue and queue.startswith(names.queue_prefix) and _possible(names, queue)}


def counted_delays(names: Names, policies: Iterable[RetryPolicy | None]) -> list[str]:
    """Where retries of these policies wait, as far as their delays can be listed.

    Those of a function or of jitter may be any of the STEPS. They are not asked for one by one: each that is missing
    costs a channel, and all queues together have COUNT_WITHIN. The management interface names them.
    """
    found = {delay for policy in policies if policy is not None for delay in policy.known_delays() or ()}
    return [names.delay(each) for each in sorted(found) if each <= LONGEST_DELAY]


async def queue_backlogs(
    asking: ReopeningChannel, names: Names, queues: Iterable[str], delays: Iterable[str], seen: Seen | None
) -> list[QueueBacklog]:
    """The numbers of these queues of listeners, of all that the management interface names, and of delays."""
    found = []
    for queue in sorted({*queues, *(seen.served(names) if seen is not None else ())}):
        counts = await count(asking, queue, seen)
        if counts is None:
            continue
        dead = await count(asking, names.dead_letter_queue(queue), seen)
        found.append(
            QueueBacklog(
                queue=queue.removeprefix(names.queue_prefix),
                transport=NAME,
                binding_keys=seen.binding_keys(names, queue) if seen is not None else None,
                queued=counts.messages,
                retrying=None,  # retries of all queues wait behind the same delays
                leased=counts.unacknowledged,
                dead=0 if dead is None else dead.messages,
                consumers=counts.consumers,
            )
        )
    if seen is not None:
        delays = sorted(queue for queue in seen.queues if queue.startswith(names.delay_prefix))
    for delay in delays:
        counts = await count(asking, delay, seen)
        if counts is not None and counts.messages != 0:
            found.append(QueueBacklog(queue=delay, transport=NAME, retrying=counts.messages))
    return found


def untold(names: Names, queues: Iterable[str]) -> list[QueueBacklog]:
    """The same while the broker does not answer."""
    return [
        QueueBacklog(
            queue=queue.removeprefix(names.queue_prefix),
            transport=NAME,
            binding_keys=None,
            queued=None,
            retrying=None,
            leased=None,
            dead=None,
        )
        for queue in sorted(queues)
    ]


async def count(asking: ReopeningChannel, queue: str, seen: Seen | None = None) -> Counts | None:
    """How much a queue holds; None: there is no such queue.

    The management interface is some seconds late. What workers hold is all that it alone can tell.
    """
    told = None
    if seen is not None:
        if queue not in seen.queues:
            return None
        told = seen.queues[queue].counts
    try:
        found = await asking.ask(lambda channel: channel.queue_declare(queue, passive=True))
    except ChannelNotFoundEntity:
        return None
    except (ChannelAccessRefused, ChannelLockedResource):  # this user may not ask, or one connection has it to itself
        return told or _UNTOLD
    held = None if told is None else told.unacknowledged
    return Counts((found.message_count or 0) + (held or 0), found.consumer_count or 0, held)


def _possible(names: Names, queue: str) -> bool:
    """Whether a queue of the broker may be called so: a name may have been recorded for the database."""
    try:
        names.queue(queue.removeprefix(names.queue_prefix))
    except ConfigurationError:
        return False
    return True
