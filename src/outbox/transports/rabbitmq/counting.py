"""Counting: what lies in the queues of a broker, for processes that neither publish nor consume."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource, ChannelNotFoundEntity

from outbox.core.errors import ConfigurationError
from outbox.core.store import QueueBacklog
from outbox.transports.rabbitmq.channels import Wire
from outbox.transports.rabbitmq.declaring import Asking
from outbox.transports.rabbitmq.management import Counts, Seen
from outbox.transports.rabbitmq.topology import Names

COUNT_WITHIN = 3.0  # seconds for all queues together
CLOSE_WITHIN = 0.5  # seconds

NAME = "rabbitmq"

_UNTOLD = Counts(None, None)


class Counting:
    """A connection for any number of counts. A broker with an alarm does not answer on one that has published."""

    def __init__(self, connect: Callable[[], Awaitable[Wire]]) -> None:
        self._connect = connect
        self._wire: Wire | None = None

    async def channel(self) -> AbstractChannel:
        if self._wire is None or self._wire.ended.done():
            self._wire = await self._connect()
        return await self._wire.client_channel()

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await wire.close()


def of_listeners(names: Names, recorded: Iterable[str]) -> set[str]:
    """Those of the recorded queues that may be at this broker."""
    return {queue for queue in recorded if queue and queue.startswith(names.queue_prefix) and _possible(names, queue)}


async def queue_backlogs(
    asking: Asking, names: Names, queues: Iterable[str], delays: Iterable[str], seen: Seen | None
) -> list[QueueBacklog]:
    """What lies in these queues of listeners, in all that the management interface names, and behind delays."""
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
                delivered=counts.messages,
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
            delivered=None,
            retrying=None,
            leased=None,
            dead=None,
        )
        for queue in sorted(queues)
    ]


async def count(asking: Asking, queue: str, seen: Seen | None = None) -> Counts | None:
    """How much a queue holds; None: there is no such queue."""
    if seen is not None:
        if queue not in seen.queues:
            return None
        counts = seen.queues[queue].counts
        if counts is not None:
            return counts
    try:
        found = await asking.ask(lambda channel: channel.queue_declare(queue, passive=True))
    except ChannelNotFoundEntity:
        return None
    except (ChannelAccessRefused, ChannelLockedResource):  # this user may not ask, or one connection has it to itself
        return _UNTOLD
    return Counts(found.message_count or 0, found.consumer_count or 0)


def _possible(names: Names, queue: str) -> bool:
    """Whether a queue of the broker may be called so: a name may have been recorded for the database."""
    try:
        names.queue(queue.removeprefix(names.queue_prefix))
    except ConfigurationError:
        return False
    return True
