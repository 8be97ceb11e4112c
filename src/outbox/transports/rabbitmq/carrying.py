"""Carrying: the next copy of a delivered message, confirmed before the delivery is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from outbox.core.durations import NO_DELAY
from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.core.events import Observer
from outbox.core.message import Message
from outbox.core.outage import TRANSPORT, Outage
from outbox.core.pace import Pace
from outbox.core.tracking import new_id
from outbox.core.transport import Refusal
from outbox.transports.rabbitmq.confirms import Answer, Outgoing
from outbox.transports.rabbitmq.properties import Envelope, Unsendable
from outbox.transports.rabbitmq.publishing import Publishing, Result
from outbox.transports.rabbitmq.topology import Names, Topology, step

SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two tries, doubling


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is carried on."""

    queue: str  # as the broker calls it
    message: Message
    envelope: Envelope
    headers: Mapping[str, object]  # of our own, for the next copy


class Courier:
    """Publishes copies, those of one moment in one batch."""

    def __init__(
        self,
        publishing: Publishing,
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

    async def back(self, parcel: Parcel, delay: timedelta) -> bool:
        """To its own queue, after a delay; whether it is safe there. False: nobody can take it."""
        if delay:
            return await self._until_confirmed(self._names.delay(self._held_back(delay)), parcel, delay)
        if not self._default_is_closed:
            answer = await self._once("", parcel)
            if answer is not Answer.FORBIDDEN:
                return await self._until_confirmed("", parcel, NO_DELAY, answer)
            self._default_is_closed = True
        # A user that may not write to the default exchange may still write to delays, and they lead there.
        shortest = None if self.topology is None else self.topology.shortest_delay
        return shortest is not None and await self._until_confirmed(shortest, parcel, NO_DELAY)

    async def to_the_dead(self, parcel: Parcel) -> bool:
        """To the dead letters of its queue; False: it does not fit, or this user may not, and the broker must do it."""
        if not self.writes_dead_letters:
            return False
        return await self._until_answered(self._names.dead_letter_exchange, parcel) is Answer.CONFIRMED

    async def make_trial_queue(self, queue: str) -> str:
        """Declare a queue for trials of this process, and tell its name; raises what declaring raises."""
        name = self._names.trial_queue(new_id())
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

    async def to_trial(self, parcel: Parcel, trial_queue: str) -> bool:
        """To a trial queue of this process; False: that is gone, or this user may not publish to it."""
        if not self._trials_by_default:
            exchange = self._names.dead_letter_exchange
            return await self._until_answered(exchange, parcel, trial_queue) is Answer.CONFIRMED
        if self._default_is_closed:
            return False
        answer = await self._until_answered("", parcel, trial_queue)
        self._default_is_closed = answer is Answer.FORBIDDEN
        return answer is Answer.CONFIRMED

    async def back_at_once(self, parcel: Parcel) -> bool:
        """To its own queue, if that works without another try."""
        return not self._default_is_closed and await self._once("", parcel) is Answer.CONFIRMED

    async def back_later(self, parcel: Parcel, delay: timedelta) -> bool:
        """To its own queue after about so long, if there is a delay and that works without another try."""
        nearest = None if self.topology is None else self.topology.nearest_delay(delay)
        return nearest is not None and await self._once(nearest, parcel) is Answer.CONFIRMED

    async def close(self) -> None:
        """Nobody waits for answers any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_confirmed(
        self, exchange: str, parcel: Parcel, delay: timedelta, answer: Result | None = None
    ) -> bool:
        """Try until it is confirmed, or until it is certain that it never will be."""
        pace = Pace(LONGEST_PAUSE, SHORTEST_PAUSE)
        if answer is None:
            answer = await self._once(exchange, parcel)
        while answer is not Answer.CONFIRMED:
            if isinstance(answer, Refusal) and answer.permanent:
                return False
            if answer in (Answer.MISSING, Answer.RETURNED) and delay:
                await self._make(delay, pace, parcel)
            else:
                await self._pause(pace, parcel, answer)
            answer = await self._once(exchange, parcel)
        return True

    async def _until_answered(self, exchange: str, parcel: Parcel, routing_key: str | None = None) -> Result:
        """Try until the broker has taken it or refused it."""
        pace = Pace(LONGEST_PAUSE, SHORTEST_PAUSE)
        while True:
            answer = await self._once(exchange, parcel, routing_key)
            answered = (Answer.CONFIRMED, Answer.FORBIDDEN, Answer.MISSING, Answer.RETURNED)
            if answer in answered or isinstance(answer, Refusal):
                return answer
            await self._pause(pace, parcel, answer)

    async def _make(self, delay: timedelta, pace: Pace, parcel: Parcel) -> None:
        """A delay that nobody could list beforehand is made when it is first wanted."""
        try:
            await self._declare(Topology.of_delay(self._names, self._held_back(delay)))
        except (ConfigurationError, TransportUnavailable) as error:
            await self._pause(pace, parcel, error)

    def _held_back(self, delay: timedelta) -> timedelta:
        return step(delay) if self.topology is None else self.topology.delay(delay)

    def _outgoing(self, exchange: str, parcel: Parcel, routing_key: str | None = None) -> Outgoing:
        message = parcel.message
        properties = parcel.envelope.carried_on(message.routing_key, message, parcel.headers)
        return Outgoing(exchange, routing_key or parcel.queue, properties, message.body, message.id)

    async def _once(self, exchange: str, parcel: Parcel, routing_key: str | None = None) -> Result:
        try:
            outgoing = self._outgoing(exchange, parcel, routing_key)
        except Unsendable as error:
            return Refusal(str(error), permanent=True)
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if not self._batch:
            task = asyncio.create_task(self._publish(), name="outbox copies")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._batch.append((outgoing, answer))
        result = await answer
        if self._outages and result is Answer.CONFIRMED and parcel.queue in self._outages:
            self._outages.pop(parcel.queue).over()
        return result

    async def _publish(self) -> None:
        batch, self._batch = self._batch, []
        results: list[Result] = [Answer.UNKNOWN] * len(batch)
        try:
            results = await self._publishing.publish([outgoing for outgoing, _ in batch])
        except Exception:  # noqa: BLE001, S110 - no answer, whatever the reason: it is tried again
            pass
        finally:
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():
                    answer.set_result(result)

    async def _pause(self, pace: Pace, parcel: Parcel, answer: object) -> None:
        pause = pace.pause()
        error = answer if isinstance(answer, Exception) else TransportUnavailable(_words(answer))
        usual = Outage(f"copies for {parcel.queue}", TRANSPORT, self._observe)
        self._outages.setdefault(parcel.queue, usual).struck(error, timedelta(seconds=pause))
        await asyncio.sleep(pause)


def _words(answer: object) -> str:
    match answer:
        case Refusal(error):
            return f"RabbitMQ refuses it: {error}"
        case Answer.FORBIDDEN:
            return "this user may not publish there: it needs the write permissions that `outbox topology` prints"
        case Answer.REJECTED:
            return "the queue takes no more"
        case _:
            return "RabbitMQ did not confirm it"
