"""Unacknowledged: what one channel delivered, until all of it is settled or the channel is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, assert_never

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.durations import NO_DELAY
from outbox.core.errors import Undecodable
from outbox.core.message import Message
from outbox.core.settlement import Settlement
from outbox.transports.rabbitmq.acknowledging import AcknowledgementWriter
from outbox.transports.rabbitmq.channel import Channel, Incoming, Lost, counts_acquired
from outbox.transports.rabbitmq.consumed_queue import ConsumedQueue
from outbox.transports.rabbitmq.copies import after_failure, of_dead_letter
from outbox.transports.rabbitmq.delivery import DeliveryReceiver, RabbitmqDelivery, unread
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.headers import CRASHES, ON_TRIAL, too_large
from outbox.transports.rabbitmq.isolation_queue import ISOLATED_WITHIN
from outbox.transports.rabbitmq.poison import COPY_WITHIN, Key, Verdict
from outbox.transports.rabbitmq.republishing import RepublishedMessage

COPIES_WITHIN = 5.0  # seconds that closing waits for copies to be confirmed, and then for the channel's end
MOST_UNDER_WAY = 16  # a channel of RabbitMQ hands 32 words on to its queue before it waits for the queue to answer
ON_ITS_WAY = 0.05  # seconds in which everything comes that the broker has sent
ALONE_AFTER = 0.05  # seconds in which other suspects of the same moment go out of the way


class Unacknowledged:
    """The deliveries of one channel. Each ends here, whichever way."""

    def __init__(
        self, channel: Channel, consumed: ConsumedQueue, receiver: DeliveryReceiver, isolation_queue: str | None = None
    ) -> None:
        self.isolation_queue = isolation_queue  # where its deliveries are from, if not from the listener's queue
        self._channel = channel
        self._receiver = receiver
        self._consumed = consumed
        self._suspects = consumed.suspects
        self._lost_runs = consumed.lost_runs
        self._counts_acquired = counts_acquired(channel.server_version)
        self.queue = consumed.name
        self._acknowledging = AcknowledgementWriter(channel, consumed.prefetch)
        self._open: dict[int, RabbitmqDelivery] = {}
        self._suspected: set[int] = set()  # of those: they wait to be tried
        self._tasks: dict[asyncio.Task[None], Settlement] = {}  # copies that are on their way, and who waits for them
        self._closing = asyncio.Event()
        channel.ended.add_done_callback(lambda _: self._lost())

    @property
    def idle(self) -> bool:
        return not self._open and not self._tasks

    def take(self, incoming: Incoming) -> None:
        """One delivery, in the moment in which it comes. Whatever it is, it ends neither channel nor connection."""
        try:
            self._take(incoming)
        except Exception as error:  # noqa: BLE001 - only the broker can carry what cannot be read
            self._open.pop(incoming.tag, None)
            self._acknowledging.reject(incoming.tag, requeue=False)
            self._receiver.refused(unread(incoming), Dead(Reason.UNDECODABLE, f"{error}"))

    def _take(self, incoming: Incoming) -> None:
        """Raises Undecodable if only the broker can carry it to the dead letters."""
        is_ours = self.isolation_queue is not None
        envelope = Envelope.of(incoming, is_ours=is_ours, counts_acquired=self._counts_acquired)
        largest = self._consumed.largest_body
        if len(incoming.body) > largest:
            error = Undecodable(too_large(incoming.body, largest))
            if envelope.rejectable(incoming.exchange):
                raise error
            self._refuse(incoming, envelope, error)
            return
        if envelope.is_dead_letter:
            envelope = envelope.revived()  # it was moved back, by a shovel or by hand
        try:
            message = envelope.message(incoming.routing_key, incoming.body)
            verdict, crashes = self._judge(envelope, message)
            isolated = verdict is Verdict.SUSPECT or verdict is Verdict.ISOLATED
            attempt = Attempt(message, envelope.attempt_count, incoming.tag, crashes, isolated)
        except Undecodable as error:
            self._refuse(incoming, envelope, error)
            return
        delivery = self._open[incoming.tag] = RabbitmqDelivery(attempt, envelope, incoming, self)
        if verdict is Verdict.TRUSTED or verdict is Verdict.DEAD:
            if self._lost_runs.by_key and delivery.key in self._lost_runs.by_key:
                self._withhold(delivery, self._after_its_first_run)
            else:
                self._receiver.ready(delivery)
        elif verdict is Verdict.SUSPECT:
            self._suspected.add(incoming.tag)
            self._consumed.prefetch.waiting(len(self._suspected))
            turn = partial(self._get_ready, delivery)
            self._receiver.when_prepared(partial(self._suspects.wait, delivery.key, turn))
        elif self._suspects.begin(delivery.key):
            if not self._suspects.arrived(delivery.key, delivery):
                self._start(self._try_alone(delivery), Settlement())
        else:
            self._withhold(delivery, self._step_aside)

    def _withhold(
        self, delivery: RabbitmqDelivery, ending: Callable[[RabbitmqDelivery, Settlement], Coroutine[Any, Any, None]]
    ) -> None:
        """Keep it from its listener."""
        delivery.is_settled = True
        settlement = Settlement()
        self._start(ending(delivery, settlement), settlement)

    def _refuse(self, incoming: Incoming, envelope: Envelope, error: Undecodable) -> None:
        """Dead-letter what can be carried and not be read."""
        attempt, dead = unread(incoming, envelope), Dead(Reason.UNDECODABLE, str(error))
        delivery = self._open[incoming.tag] = RabbitmqDelivery(attempt, envelope.without_ours(), incoming, self)
        delivery.settle(dead).then(lambda settlement: self._receiver.refused(attempt, dead, settlement))

    def settle(self, delivery: RabbitmqDelivery, outcome: Outcome, settlement: Settlement) -> None:
        tag = delivery.incoming.tag
        if self._channel.ended.done():
            self._suspects.end(delivery.key)
            self._lost_runs.end(delivery)
            settlement.set_result(False)
            return
        if delivery.attempt.isolated:
            if delivery.on_trial:
                self._start(self._end_isolated_run(delivery.key, settlement), Settlement())
            else:
                self._suspects.end(delivery.key)
        match outcome:
            case Done():
                self._done(tag, settlement)
            case RetryIn(delay, error):
                headers = {**after_failure(delivery.attempt, delivery.envelope, error), CRASHES: None}
                self._start(self._retry(delivery, settlement, headers, delay), settlement)
            case Dead():
                self._start(self._dead_letter(delivery, settlement, outcome), settlement)
            case Released(delay) if delay and not delivery.on_trial:
                self._start(self._give_back_later(delivery, settlement, delay), settlement)
            case Released() if self._suspects.would_suspect(delivery.envelope, self._consumed.listener):
                # One more return would begin to look like a crash. A new copy has none.
                crashes = delivery.attempt.crash_count or None
                self._start(self._give_back(delivery, settlement, {CRASHES: crashes}), settlement)
            case Released():
                self._nack(tag, settlement, requeue=True)
            case _:
                assert_never(outcome)

    async def close(self) -> None:
        """Write what is known and let the channel go; what is not settled comes back."""
        self._closing.set()
        await self._end_copies()
        self._acknowledging.flush(patience=0.0)
        if self._acknowledging.unheard > MOST_UNDER_WAY:
            await self._let_the_queue_hear()
            await self._end_copies()
            self._acknowledging.flush(patience=0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(COPIES_WITHIN):
                await self._channel.close()

    async def stop(self) -> None:
        """Take no more. What is on its way comes first: the broker would take it back, and count that as a crash."""
        self._acknowledging.makes_room = False
        with suppress(Lost, TimeoutError):
            await asyncio.sleep(ON_ITS_WAY)
            await self._channel.heard()
            await self._channel.cancel()
            self._acknowledging.unheard = 0
        self._acknowledging.makes_room = True
        self._acknowledging.flush()

    async def _end_copies(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(COPIES_WITHIN):
                while self._tasks:  # one may begin another
                    await asyncio.wait(self._tasks)
        for task, settlement in self._tasks.items():
            settlement.cancel()
            task.cancel()

    async def _let_the_queue_hear(self) -> None:
        """Wait until the queue has received everything: RabbitMQ forgets what a closing channel has not handed on yet.

        Only the beginning and the end of a consumer are answered by the queue itself. What comes meanwhile goes back,
        but not before the end, or it would come again.
        """
        arrived: list[Incoming] = []
        with suppress(Lost, TimeoutError):
            async with asyncio.timeout(COPIES_WITHIN):
                await self._channel.consume(self.isolation_queue or self.queue, 1, arrived.append)
                await self._channel.heard()
                await self._channel.cancel()
                self._acknowledging.unheard = 0
                for incoming in arrived:
                    self.take(incoming)

    def _judge(self, envelope: Envelope, message: Message) -> tuple[Verdict, int]:
        """How it is to be met. A copy in a trial queue counts the start that it is there for."""
        if self.isolation_queue is not None:
            return Verdict.ISOLATED, max(0, (envelope.crashes or 0) - 1)
        return self._suspects.judge(envelope, (self.queue, message.id), self._consumed.listener)

    def _is_here(self, delivery: RabbitmqDelivery) -> bool:
        return not delivery.is_settled and delivery.incoming.tag in self._open

    def _get_ready(self, delivery: RabbitmqDelivery) -> bool:
        """It is its turn: its worker sends it to its trial as soon as nothing else runs."""
        if not self._is_here(delivery):
            return False
        self._receiver.ready(delivery)
        return True

    async def isolate(self, delivery: RabbitmqDelivery) -> RabbitmqDelivery | None:
        """Publish it anew, and wait for the copy."""
        isolation_queue = await self._receiver.isolation_queue_name()
        if not self._is_here(delivery) or not self._suspects.send(delivery.key):
            return None
        delivery.is_settled = True
        settlement = Settlement()
        with self._suspects.expecting(delivery.key) as arrival:
            try:
                publishing = self._start(self._publish_isolated(delivery, settlement, isolation_queue), settlement)
                async with asyncio.timeout(COPY_WITHIN if isolation_queue is None else ISOLATED_WITHIN):
                    await asyncio.wait([arrival])
                    if arrival.result().holder.isolation_queue is None:
                        await asyncio.sleep(ALONE_AFTER)
                    else:
                        await asyncio.wait([publishing])
                    await self._suspects.alone()
            except TimeoutError:
                pass
            except BaseException:
                if arrival.done():
                    arrival.result().settle(Released())
                raise
            copy: RabbitmqDelivery | None = arrival.result() if arrival.done() else None
        return copy

    async def _publish_isolated(
        self, delivery: RabbitmqDelivery, settlement: Settlement, isolation_queue: str | None
    ) -> None:
        """The copy is safe before the delivery is acknowledged, and that is read before the listener may be called."""
        crashes = delivery.attempt.crash_count
        counted = self._republished(delivery, {CRASHES: crashes + 1})
        if isolation_queue is not None and await self._consumed.republisher.to_isolation(counted, isolation_queue):
            self._done(delivery.incoming.tag, settlement)
        else:
            await self._retry(delivery, settlement, {CRASHES: crashes, ON_TRIAL: True}, NO_DELAY)
        self._acknowledging.flush(patience=0.0)
        self._suspects.sent(delivery.key)
        with suppress(Lost, TimeoutError):
            await self._channel.heard()

    async def _after_its_first_run(self, delivery: RabbitmqDelivery, settlement: Settlement) -> None:
        """Have it ready when the run that lost its channel has ended; behind a delay, if that goes on."""
        delay = await self._lost_runs.wait(delivery.key, self._closing)
        if delay is None:
            delivery.is_settled = False
            self._receiver.ready(delivery)
        else:
            await self._give_back_later(delivery, settlement, delay)

    async def _try_alone(self, delivery: RabbitmqDelivery) -> None:
        """Have it ready when all other suspects are back at the broker."""
        await asyncio.sleep(ALONE_AFTER)
        await self._suspects.alone()
        self._receiver.ready(delivery)

    async def isolation_ended(self, delivery: RabbitmqDelivery) -> None:
        """Wait until the broker knows how a trial ended."""
        await self._suspects.ended(delivery.key)

    async def _end_isolated_run(self, key: Key, settlement: Settlement) -> None:
        """The next one is tried when the broker knows how this one ended: its crash would count for both."""
        try:
            self._acknowledging.flush(patience=0.0)
            await settlement
            with suppress(Lost, TimeoutError):
                await self._channel.heard()
        finally:
            self._suspects.end(key)

    async def _step_aside(self, delivery: RabbitmqDelivery, settlement: Settlement) -> None:
        """Another one is tried: back to the broker, and no longer on trial."""
        with self._suspects.leaving():
            await self._retry(delivery, settlement, {CRASHES: delivery.attempt.crash_count}, NO_DELAY)
            self._acknowledging.flush(patience=0.0)
            await self._channel.heard()

    # How deliveries end.

    async def _retry(
        self, delivery: RabbitmqDelivery, settlement: Settlement, headers: dict[str, object], delay: timedelta
    ) -> None:
        if await self._consumed.republisher.back(self._republished(delivery, headers), delay):
            self._done(delivery.incoming.tag, settlement)
        else:
            dead = Dead(Reason.UNDECODABLE, "no copy of it can be published for its next attempt")
            settlement.then(partial(self._receiver.refused, delivery.attempt, dead))
            await self._reject(delivery, settlement)

    async def _dead_letter(self, delivery: RabbitmqDelivery, settlement: Settlement, outcome: Dead) -> None:
        headers = of_dead_letter(delivery.attempt, delivery.envelope, self.queue, outcome)
        if await self._consumed.republisher.to_dead_letters(self._republished(delivery, headers)):
            self._done(delivery.incoming.tag, settlement)
        else:
            await self._reject(delivery, settlement)

    async def _reject(self, delivery: RabbitmqDelivery, settlement: Settlement) -> None:
        """No copy of it fits: the broker moves it to the dead letters, or, if it cannot, its body goes there alone."""
        tag = delivery.incoming.tag
        if delivery.envelope.rejectable(delivery.incoming.exchange):
            self._nack(tag, settlement, requeue=False)
            return
        attempt, bare = delivery.attempt, delivery.envelope.bare()
        dead = Dead(
            Reason.UNDECODABLE, "neither a copy of its headers nor its x-death can be carried: they are left out"
        )
        headers = of_dead_letter(attempt, bare, self.queue, dead)
        copy = RepublishedMessage(self.queue, attempt.message, bare, headers)
        if await self._consumed.republisher.to_dead_letters(copy):
            self._done(tag, settlement)
        else:
            settlement.set_result(False)  # it stays in the queue, unacknowledged

    async def _give_back(self, delivery: RabbitmqDelivery, settlement: Settlement, headers: dict[str, object]) -> None:
        if self.isolation_queue is not None:
            await self._retry(delivery, settlement, headers, NO_DELAY)  # to leave it here would count as a crash
        elif await self._consumed.republisher.back_at_once(self._republished(delivery, headers)):
            self._done(delivery.incoming.tag, settlement)
        else:
            self._nack(delivery.incoming.tag, settlement, requeue=True)

    async def _give_back_later(self, delivery: RabbitmqDelivery, settlement: Settlement, delay: timedelta) -> None:
        """Behind a delay, because what is held here takes up the prefetch. Where there is no delay it is held."""
        headers: dict[str, object] = {CRASHES: delivery.attempt.crash_count or None}
        if await self._consumed.republisher.back_later(self._republished(delivery, headers), delay):
            self._done(delivery.incoming.tag, settlement)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(delay.total_seconds()):
                await self._closing.wait()
        await self._give_back(delivery, settlement, headers)

    def _republished(self, delivery: RabbitmqDelivery, headers: dict[str, object]) -> RepublishedMessage:
        return RepublishedMessage(self.queue, delivery.attempt.message, delivery.envelope, headers)

    def _start(self, ending: Coroutine[Any, Any, None], settlement: Settlement) -> asyncio.Task[None]:
        task = asyncio.create_task(ending, name=f"outbox end of a delivery of {self.queue}")
        self._tasks[task] = settlement
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            self._channel.retire(f"a delivery could not be settled: {task.exception()}")  # it comes back

    def _done(self, tag: int, settlement: Settlement) -> None:
        if self._open.pop(tag, None) is None:
            settlement.set_result(False)
            return
        if tag in self._suspected:
            self._suspected.discard(tag)
            self._consumed.prefetch.waiting(len(self._suspected))
        elif self.isolation_queue is None:
            self._consumed.prefetch.settled(time.monotonic())
        self._acknowledging.done(tag, settlement)

    def _nack(self, tag: int, settlement: Settlement, *, requeue: bool) -> None:
        known = self._open.pop(tag, None) is not None
        if known:
            if tag in self._suspected:
                self._suspected.discard(tag)
                self._consumed.prefetch.waiting(len(self._suspected))
            self._acknowledging.reject(tag, requeue=requeue)
        settlement.set_result(known)

    def _lost(self) -> None:
        """The channel is gone, and with it every hold on what it delivered."""
        lost, self._open = self._open, {}  # before any of them has its turn
        clear = self._suspects.clear if self.isolation_queue is None else self._suspects.clear_isolated
        for delivery in lost.values():
            delivery.is_lost = True
            clear(delivery.envelope, delivery.key)
            self._suspects.end(delivery.key)
        for settlement in self._acknowledging.abandon():
            settlement.set_result(False)
        for task, settlement in self._tasks.items():
            settlement.set_result(False)
            task.cancel()
        handed_on = (each for tag, each in lost.items() if not each.is_settled and tag not in self._suspected)
        self._receiver.lost(self, handed_on)
