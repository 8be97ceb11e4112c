"""RabbitmqDeadLetters: the messages of the `.dlq` queues.

A look takes letters out and gives them back, which RabbitMQ counts. Where no limit is set that means nothing; but a
queue that was made before RabbitMQ 4 has one there. So letters that came back a few times are replaced by copies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

from outbox.core.dead_letter import DeadLetter, DeadLetters, Deaths, Filter
from outbox.core.errors import ConfigurationError, NotFound, TransportUnavailable
from outbox.core.transport import Refusal
from outbox.transports.rabbitmq.aiormq_channel import asked
from outbox.transports.rabbitmq.channel import BrokerConnection, Lost
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.dead_letters.browsing import MOST_AT_ONCE, Browse, alone, browsing
from outbox.transports.rabbitmq.dead_letters.letter import Letter
from outbox.transports.rabbitmq.publishing import BatchPublisher, Result
from outbox.transports.rabbitmq.topology import Names, dead_letter_queue

RENEWED_AFTER = 5  # returns; RabbitMQ 4 drops a message after 20 by default
STEP = 250  # letters of a look beyond what it needs, to find the end of those that came back
COPIES_AT_ONCE = 100
MOST_LETTERS_READ = 10_000  # letters of a queue that are read to tell when and why they died
MOST_PLACES = 100_000  # letters of which it is remembered where they lie

_NOT_TOLD = (403, 406)  # this user may not ask, or the arguments are others


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """What it takes to look and to mend."""

    connection: BrokerConnection
    publishing: BatchPublisher


@dataclass(slots=True, eq=False)
class RabbitmqDeadLetters(DeadLetters):
    """Dead letters of listeners' queues. Copies of one death, which a lost connection may leave, are one letter."""

    names: Names
    hands: Callable[[], AbstractAsyncContextManager[BrokerAccess]]
    queues: Callable[..., Awaitable[Collection[str]]]  # of listeners: those named, those with letters, those known
    largest_body: int  # bytes that a worker takes
    _turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = field(default_factory=WeakKeyDictionary)
    _named: set[str] = field(default_factory=set)  # queues that a caller asked for by name
    _places: dict[int, str] = field(default_factory=dict)

    async def chosen(self, filter: Filter) -> list[DeadLetter]:
        queue = filter.queue
        if queue == "":
            return []
        if queue is not None:
            self._named.add(queue)
        found: dict[int, DeadLetter] = {}
        async with self._looking() as look:
            for each in await self.queues(self._named) if queue is None else [queue]:
                async with look.through(each) as browse:
                    found |= await _listed(browse, filter)
        letters = [found[id] for id in sorted(found)[: filter.limit]]
        self._remember(letters)
        return letters

    async def deaths(self, within: timedelta, *, known: Collection[str] = ()) -> list[Deaths]:
        since, found = datetime.now(UTC) - within, list[Deaths]()
        async with self._looking() as look:
            for queue in await self.queues(self._named, known):
                async with look.through(queue) as browse:
                    found += await _counted(browse, queue, since)
        return found

    async def show(self, id: int) -> DeadLetter:
        async with self._looking() as look:
            for queue in await self._where([id]):
                async with look.through(queue) as browse:
                    found = [letter async for letter in _until_found(browse, {id})]
                    if found:
                        self._remember([found[0].dead])
                        return found[0].dead
        raise NotFound(f"no dead letter has the id {id}")

    async def replay(self, ids: Sequence[int]) -> int:
        return await self._end(ids, lambda look, letters: look.revive(letters))

    async def discard(self, ids: Sequence[int]) -> int:
        return await self._end(ids, _all_of_them)

    async def _end(
        self, ids: Sequence[int], ending: Callable[[LetterAccess, list[Letter]], Awaitable[_Removable]]
    ) -> int:
        """Take these out for good, each as soon as it may be; how many there were."""
        wanted, gone = set(ids), set[int]()
        async with self._looking() as look:
            for queue in await self._where(ids):
                if wanted <= gone:
                    break
                async with look.through(queue) as browse:
                    async for letters in _batches(_until_found(browse, wanted - gone)):
                        ended = await ending(look, letters)
                        browse.remove(ended.letters)
                        gone |= {letter.id for letter in ended.letters}
                        if ended.trouble is not None:
                            raise ended.trouble
        return len(gone)

    async def _where(self, ids: Collection[int]) -> Collection[str]:
        """The queues in which these may be."""
        known = {self._places.get(id) for id in ids}
        return sorted(queue for queue in known if queue) if None not in known else await self.queues(self._named)

    def _remember(self, letters: Sequence[DeadLetter]) -> None:
        self._places |= {letter.id: letter.queue for letter in letters if letter.queue is not None}
        for id in list(self._places)[: max(0, len(self._places) - MOST_PLACES)]:
            del self._places[id]

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[LetterAccess]:
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        try:
            async with turn, self.hands() as hands, alone(hands.connection, self.names.dead_letter_lock):
                yield LetterAccess(hands, self.names, self.largest_body)
        except (Lost, TimeoutError) as error:
            raise TransportUnavailable(f"RabbitMQ went away from a look at dead letters: {error}") from error


@dataclass(frozen=True, slots=True)
class _Removable:
    """Letters that may be taken out, and what is wrong with the others."""

    letters: Sequence[Letter]
    trouble: Exception | None = None


@dataclass(frozen=True, slots=True)
class LetterAccess:
    """One look, while no other process looks."""

    hands: BrokerAccess
    names: Names
    largest_body: int

    @asynccontextmanager
    async def through(self, queue: str) -> AsyncIterator[Browse]:
        """The dead letters of one queue; what came back often is replaced afterwards."""
        async with self._browsing(queue) as browse:
            yield browse
        if browse.most_returned >= RENEWED_AFTER and await self._may_be_limited(queue):
            await self._renew(queue)

    async def revive(self, letters: Sequence[Letter]) -> _Removable:
        """Publish them to the queue where they died; those that are confirmed there may go."""
        batch, readable = [], []
        for letter in letters:
            properties = letter.revived()
            if properties is not None:
                batch.append(self._outgoing("", letter, properties))
                readable.append(letter)
        return await self._published(batch, readable)

    async def _may_be_limited(self, queue: str) -> bool:
        """Whether the queue was made with other arguments than ours, which set no limit, or that is not known."""
        wanted = dead_letter_queue(self.names, self.names.queue(queue), self.hands.connection.server_version)
        try:
            channel = await asked(self.hands.connection.client_channel())
            arguments: dict[str, Any] = dict(wanted.arguments)
            await asked(channel.queue_declare(wanted.name, durable=True, arguments=arguments))
            await asked(channel.close())
        except Lost as error:
            if error.ended.code in _NOT_TOLD:
                return True
            raise
        return False

    async def _renew(self, queue: str) -> None:
        """Replace all of them by copies, in their order."""
        async with self._browsing(queue) as browse:
            left = await browse.count()
            while left > 0 and (letters := await browse.next(min(COPIES_AT_ONCE, left))):
                left -= len(letters)
                copies = [(letter, properties) for letter in letters if (properties := letter.renewed()) is not None]
                exchange = self.names.dead_letter_exchange
                ended = await self._published(
                    [self._outgoing(exchange, letter, properties) for letter, properties in copies],
                    [letter for letter, _ in copies],
                )
                browse.remove(ended.letters)
                if ended.trouble is not None:
                    raise ended.trouble

    def _browsing(self, queue: str) -> AbstractAsyncContextManager[Browse]:
        return browsing(self.hands.connection, self.names, queue, self.largest_body)

    def _outgoing(self, exchange: str, letter: Letter, properties: bytes) -> Outgoing:
        message = letter.dead.message
        queue = self.names.queue(letter.dead.queue or "")
        return Outgoing(exchange, queue, properties, message.body, message.id)

    async def _published(self, batch: list[Outgoing], letters: Sequence[Letter]) -> _Removable:
        if not batch:
            return _Removable([])
        results = await self.hands.publishing.publish(batch)
        troubles = [
            _trouble(outgoing, result)
            for outgoing, result in zip(batch, results, strict=True)
            if result is not BrokerAnswer.CONFIRMED
            and not (isinstance(result, Refusal) and result.permanent)  # those stay
        ]
        confirmed = [
            letter for letter, result in zip(letters, results, strict=True) if result is BrokerAnswer.CONFIRMED
        ]
        return _Removable(confirmed, troubles[0] if troubles else None)


async def _listed(browse: Browse, filter: Filter) -> dict[int, DeadLetter]:
    """Enough of the letters, and in any case all that came back before: their order says nothing."""
    found: dict[int, DeadLetter] = {}
    limit = most = filter.limit
    while letters := await browse.next(most):
        found |= {letter.id: letter.dead for letter in letters if filter.lets_through(letter.dead)}
        missing = limit - len(found)
        if missing <= 0 and not letters[-1].returned:
            break
        most = 1 if missing <= 0 and most == limit else max(missing, STEP)
    return found


async def _counted(browse: Browse, queue: str, since: datetime) -> list[Deaths]:
    """The youngest are at the end: a queue of which too many would have to be read is reported as a whole."""
    there = await browse.count()
    if there > MOST_LETTERS_READ:
        return [Deaths(queue=queue, reason=None, count=there)]
    ids, reasons = set[int](), Counter[str]()
    most = COPIES_AT_ONCE  # of the first ones it is not known how large they are
    while letters := await browse.next(most):
        young = {letter.id: found for letter in letters if (found := _fresh(letter, since)) is not None}
        reasons.update(reason for id, reason in young.items() if id not in ids)
        ids |= young.keys()
        letters.clear()  # with their bodies
        most = MOST_AT_ONCE
    return [Deaths(queue=queue, reason=reason, count=count) for reason, count in sorted(reasons.items())]


def _fresh(letter: Letter, since: datetime) -> str | None:
    """Why it died, if it died lately; one that may have died at any time is no old one."""
    if letter.is_of_unknown_age:
        return f"{letter.dead.reason} at an unknown time"
    return str(letter.dead.reason) if letter.dead.died_at >= since else None


async def _until_found(browse: Browse, ids: Collection[int]) -> AsyncIterator[Letter]:
    """Letters with these ids, and no look behind the last one."""
    missing = set(ids)
    most = len(missing)
    while missing and (letters := await browse.next(most)):
        for letter in letters:
            if letter.id in ids:
                missing.discard(letter.id)
                yield letter
        most = min(2 * most, MOST_AT_ONCE)


async def _batches(letters: AsyncIterator[Letter]) -> AsyncIterator[list[Letter]]:
    batch: list[Letter] = []
    async for letter in letters:
        batch.append(letter)
        if len(batch) == COPIES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


async def _all_of_them(look: LetterAccess, letters: Sequence[Letter]) -> _Removable:
    return _Removable(letters)


def _trouble(outgoing: Outgoing, result: Result) -> Exception:
    place = f"the exchange {outgoing.exchange!r}" if outgoing.exchange else "the default exchange, amq.default"
    match result:
        case BrokerAnswer.FORBIDDEN:
            return ConfigurationError(f"this user may not publish to {place}: give it the write permission")
        case BrokerAnswer.RETURNED | BrokerAnswer.MISSING:
            return ConfigurationError(
                f"nothing at RabbitMQ takes dead letters for {outgoing.routing_key!r} any more: start its worker, or "
                "provision what `outbox topology` prints"
            )
        case _:
            return TransportUnavailable("RabbitMQ did not confirm a copy; the dead letter stays where it is")
