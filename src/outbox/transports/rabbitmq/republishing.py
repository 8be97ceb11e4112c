"""Carrying: the next copy of a delivered message, confirmed before the delivery is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from outbox.core.backoff import TRANSPORT, Backoff, Outage
from outbox.core.durations import NO_DELAY
from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.core.events import Observer
from outbox.core.message import Message, new_id
from outbox.core.transport import Refusal
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.headers import Unsendable
from outbox.transports.rabbitmq.publishing import BatchPublisher, Result
from outbox.transports.rabbitmq.topology import WAY_BACK, Names, Topology, step

SHORTEST_REPUBLISH_PAUSE, LONGEST_REPUBLISH_PAUSE = 0.2, 5.0  # seconds between two tries, doubling
_ANSWERS = (  # of a broker that is not away
    *(BrokerAnswer.FORBIDDEN, BrokerAnswer.REJECTED),
    *(BrokerAnswer.RETURNED, BrokerAnswer.MISSING),
)


@dataclass(frozen=True, slots=True)
class RepublishedMessage:
    """What is carried on."""

    queue: str  # as the broker calls it
    message: Message
    envelope: Envelope
    headers: Mapping[str, object]  # of our own, for the next copy


class Republisher:
    """Publishes copies, those of one moment in one batch."""

    def __init__(
        self,
        publishing: BatchPublisher,
        names: Names,
        declare: Callable[[Topology], Awaitable[object]],
        observe: Observer,
    ) -> None:
        self._publishing = publishing
        self._names = names
        self._declare = declare
        self._observe = observe
        self.topology: Topology | None = None  # what was declared
        self.writes_dead_letters = True  # whether the user may
        self._default_is_closed = False  # the user may not write to the default exchange
        self._trials_by_default = True  # trial queues are reached and left by that one
        self._batch: list[tuple[Outgoing, asyncio.Future[Result]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._outages: dict[str, Outage] = {}  # by queue, while its copies are not confirmed

    async def back(self, republished: RepublishedMessage, delay: timedelta) -> bool:
        """To its own queue, after a delay; whether it is safe there. False: no copy of it can be written."""
        if delay:
            return await self._until_confirmed(self._names.delay(self._held_back(delay)), republished, delay)
        if not self._default_is_closed:
            answer = await self._once("", republished)
            if answer is not BrokerAnswer.FORBIDDEN:
                return await self._until_confirmed("", republished, NO_DELAY, answer)
            self._default_is_closed = True
        # A user that may not write to the default exchange may still write to delays, and they lead there.
        shortest = None if self.topology is None else self.topology.shortest_delay
        if shortest is not None:
            return await self._until_confirmed(shortest, republished, NO_DELAY)
        return await self._until_confirmed(self._names.delay(WAY_BACK), republished, WAY_BACK)

    async def to_dead_letters(self, republished: RepublishedMessage) -> bool:
        """To the dead letters of its queue; False: it does not fit, or this user may not, and the broker must do it."""
        if not self.writes_dead_letters:
            return False
        return await self._until_answered(self._names.dead_letter_exchange, republished) is BrokerAnswer.CONFIRMED

    async def make_isolation_queue(self, queue: str) -> str:
        """Declare a queue for trials of this process, and tell its name; raises what declaring raises."""
        name = self._names.isolation_queue(new_id())
        back_by = None if self.topology is None else self.topology.shortest_delay
        if self._trials_by_default:
            try:
                await self._declare(Topology.of_trials(self._names, name, queue))
                return name
            except ConfigurationError:  # this user may make no queue, or not write to the default exchange
                if back_by is None:
                    raise
        if back_by is None:
            raise ConfigurationError(f"no trial queue for {queue!r}: nothing would hand its messages back")
        await self._declare(Topology.of_trials(self._names, name, queue, back_by))
        self._trials_by_default = False
        return name

    async def to_isolation(self, republished: RepublishedMessage, isolation_queue: str) -> bool:
        """To a trial queue of this process; False: that is gone, or this user may not publish to it."""
        if not self._trials_by_default:
            exchange = self._names.dead_letter_exchange
            return await self._until_answered(exchange, republished, isolation_queue) is BrokerAnswer.CONFIRMED
        if self._default_is_closed:
            return False
        answer = await self._until_answered("", republished, isolation_queue)
        self._default_is_closed = answer is BrokerAnswer.FORBIDDEN
        return answer is BrokerAnswer.CONFIRMED

    async def back_at_once(self, republished: RepublishedMessage) -> bool:
        """To its own queue, if that works without another try."""
        return not self._default_is_closed and await self._once("", republished) is BrokerAnswer.CONFIRMED

    async def back_later(self, republished: RepublishedMessage, delay: timedelta) -> bool:
        """To its own queue after about so long, if there is a delay and that works without another try."""
        nearest = None if self.topology is None else self.topology.nearest_delay(delay)
        return nearest is not None and await self._once(nearest, republished) is BrokerAnswer.CONFIRMED

    async def close(self) -> None:
        """No answers are waited for any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_confirmed(
        self, exchange: str, republished: RepublishedMessage, delay: timedelta, answer: Result | None = None
    ) -> bool:
        """Try until it is confirmed, or until it is certain that it never will be."""
        pace = Backoff(LONGEST_REPUBLISH_PAUSE, SHORTEST_REPUBLISH_PAUSE)
        if answer is None:
            answer = await self._once(exchange, republished)
        while answer is not BrokerAnswer.CONFIRMED:
            if isinstance(answer, Refusal) and answer.permanent:
                return False
            if answer in (BrokerAnswer.MISSING, BrokerAnswer.RETURNED) and delay:
                await self._make(delay, pace, republished)
            else:
                await self._pause(pace, republished, answer)
            answer = await self._once(exchange, republished)
        return True

    async def _until_answered(
        self, exchange: str, republished: RepublishedMessage, routing_key: str | None = None
    ) -> Result:
        """Try until the broker has taken it or refused it."""
        pace = Backoff(LONGEST_REPUBLISH_PAUSE, SHORTEST_REPUBLISH_PAUSE)
        while True:
            answer = await self._once(exchange, republished, routing_key)
            answered = (BrokerAnswer.CONFIRMED, BrokerAnswer.FORBIDDEN, BrokerAnswer.MISSING, BrokerAnswer.RETURNED)
            if answer in answered or isinstance(answer, Refusal):
                return answer
            await self._pause(pace, republished, answer)

    async def _make(self, delay: timedelta, pace: Backoff, republished: RepublishedMessage) -> None:
        """A delay that could not be listed beforehand is made when it is first wanted."""
        try:
            await self._declare(Topology.of_delay(self._names, self._held_back(delay)))
        except (ConfigurationError, TransportUnavailable) as error:
            await self._pause(pace, republished, error)

    def _held_back(self, delay: timedelta) -> timedelta:
        return step(delay) if self.topology is None else self.topology.delay(delay)

    def _outgoing(self, exchange: str, republished: RepublishedMessage, routing_key: str | None = None) -> Outgoing:
        message = republished.message
        properties = republished.envelope.carried_on(message.routing_key, message, republished.headers)
        return Outgoing(exchange, routing_key or republished.queue, properties, message.body, message.id)

    async def _once(self, exchange: str, republished: RepublishedMessage, routing_key: str | None = None) -> Result:
        try:
            outgoing = self._outgoing(exchange, republished, routing_key)
        except Unsendable as error:
            return Refusal(str(error), permanent=True)
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if not self._batch:
            task = asyncio.create_task(self._publish(), name="outbox copies")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._batch.append((outgoing, answer))
        result = await answer
        if self._outages and result is BrokerAnswer.CONFIRMED and republished.queue in self._outages:
            self._outages.pop(republished.queue).over()
        return result

    async def _publish(self) -> None:
        batch, self._batch = self._batch, []
        results: list[Result] = [BrokerAnswer.UNKNOWN] * len(batch)
        try:
            results = await self._publishing.publish([outgoing for outgoing, _ in batch])
        except Exception:  # noqa: BLE001, S110 - no answer, whatever the reason: it is tried again
            pass
        finally:
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():
                    answer.set_result(result)

    async def _pause(self, pace: Backoff, republished: RepublishedMessage, answer: object) -> None:
        pause = pace.pause()
        error = answer if isinstance(answer, Exception) else TransportUnavailable(_words(answer))
        usual = Outage(f"copies for {republished.queue}", TRANSPORT, self._observe)
        answered = isinstance(answer, Refusal | ConfigurationError) or answer in _ANSWERS
        outage = self._outages.setdefault(republished.queue, usual)
        outage.struck(error, timedelta(seconds=pause), answered=answered)
        await asyncio.sleep(pause)


def _words(answer: object) -> str:
    match answer:
        case Refusal(error):
            return f"RabbitMQ refuses it: {error}"
        case BrokerAnswer.FORBIDDEN:
            return "this user may not publish there: it needs the write permissions that `outbox topology` prints"
        case BrokerAnswer.REJECTED:
            return "the queue takes no more"
        case _:
            return "RabbitMQ did not confirm it"
