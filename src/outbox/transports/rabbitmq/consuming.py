"""Consuming: the deliveries of a queue, over as many channels as it takes one after another.

Each listener has a channel of its own: what closes one closes no other, and a slow listener holds back nobody else's
acknowledgements.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, assert_never

import aio_pika
from aiormq.abc import DeliveredMessage
from pamqp import commands
from pamqp.header import ContentHeader

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.durations import NO_DELAY
from outbox.core.errors import TransportClosed, TransportUnavailable, Undecodable
from outbox.core.events import Handled, Observer
from outbox.core.landing import Landing
from outbox.core.listener import Listener
from outbox.core.message import BYTES, LARGEST_BODY, Message
from outbox.core.outage import TRANSPORT, Outage
from outbox.core.pace import Pace
from outbox.core.tracking import new_id
from outbox.transports.rabbitmq import trials
from outbox.transports.rabbitmq.acknowledging import IMPATIENCE, PATIENCE, Acknowledgements
from outbox.transports.rabbitmq.appetite import Appetite
from outbox.transports.rabbitmq.carrying import Courier, Parcel
from outbox.transports.rabbitmq.channels import Channel, Incoming, Lost
from outbox.transports.rabbitmq.link import Link
from outbox.transports.rabbitmq.properties import (
    CRASHES,
    ON_TRIAL,
    Envelope,
    after_failure,
    of_dead_letter,
    too_large,
)
from outbox.transports.rabbitmq.suspects import ARRIVES_WITHIN, Key, Suspects, Verdict
from outbox.transports.rabbitmq.trials import TrialQueue

SETTLE_WITHIN = 0.002  # seconds that an acknowledgement waits for others to be written with it
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two tries to consume, doubling
CLOSE_WITHIN = 5.0  # seconds that closing waits for copies to be confirmed, and then for the channel's end
MOST_PREFETCH = 65_535
MOST_UNDER_WAY = 16  # a channel of RabbitMQ hands 32 words on to its queue before it waits for the queue to answer
ON_ITS_WAY = 0.05  # seconds in which everything comes that the broker has sent
ALONE_AFTER = 0.05  # seconds in which other suspects of the same moment go out of the way

_NOT_FOUND = 404


class RabbitmqDelivery:
    """An attempt that a channel holds."""

    __slots__ = ("attempt", "envelope", "incoming", "is_settled", "tray")

    def __init__(self, attempt: Attempt, envelope: Envelope, incoming: Incoming, tray: Tray) -> None:
        self.attempt = attempt
        self.envelope = envelope
        self.incoming = incoming
        self.tray = tray
        self.is_settled = False

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

    def completion(self) -> None:
        return None

    async def start(self) -> RabbitmqDelivery | None:
        return self if self.on_trial else await self.tray.send_to_trial(self)

    async def settled(self) -> None:
        await self.tray.trial_ended(self)

    def settle(self, outcome: Outcome) -> Landing:
        landing = Landing()
        if self.is_settled:
            landing.cancel()
            return landing
        self.is_settled = True
        self.tray.settle(self, outcome, landing)
        return landing

    @property
    def on_trial(self) -> bool:
        return self.tray.trial_queue is not None or self.envelope.on_trial

    @property
    def key(self) -> Key:
        return self.tray.queue, self.attempt.message.id

    @property
    def expired(self) -> bool:
        expires_at = self.attempt.message.expires_at
        return expires_at is not None and expires_at <= datetime.now(UTC)


class Tray:
    """What one channel delivered, until all of it is settled or the channel is gone."""

    def __init__(self, channel: Channel, deliveries: RabbitmqDeliveries, trial_queue: str | None = None) -> None:
        self.trial_queue = trial_queue  # where its deliveries are from, if not from the listener's queue
        self._channel = channel
        self._deliveries = deliveries
        self._suspects = deliveries.suspects
        self.queue = deliveries.queue
        self._acknowledgements = Acknowledgements()
        self._open: dict[int, RabbitmqDelivery] = {}
        self._suspected: set[int] = set()  # of those: they wait to be tried
        self._words = 0  # acknowledgements and the like that the queue may not have heard yet
        self._makes_room = True  # whether acknowledgements are written, for which the broker sends more
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], Landing] = {}  # copies that are on their way, and who waits for them
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
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
            self._acknowledgements.settled(incoming.tag)
            self._say((), [(incoming.tag, False)])
            self._deliveries.refused(_unread(incoming), Dead(Reason.UNDECODABLE, f"{error}"))

    def _take(self, incoming: Incoming) -> None:
        """Raises Undecodable if only the broker can carry it to the dead letters."""
        envelope = Envelope.of(incoming, is_ours=self.trial_queue is not None)
        largest = self._deliveries.largest_body
        if len(incoming.body) > largest:
            error = Undecodable(too_large(incoming.body, largest))
            if envelope.rejectable(incoming.exchange):
                raise error
            self._refuse(incoming, envelope, error)
            return
        if envelope.is_dead_letter:
            envelope = envelope.revived()  # somebody moved it back, by a shovel or by hand
        try:
            message = envelope.message(incoming.routing_key, incoming.body)
            verdict, crashes = self._judge(envelope, message)
            isolated = verdict is Verdict.SUSPECT or verdict is Verdict.ON_TRIAL
            attempt = Attempt(message, envelope.attempt_count, incoming.tag, crashes, isolated)
        except Undecodable as error:
            self._refuse(incoming, envelope, error)
            return
        delivery = self._open[incoming.tag] = RabbitmqDelivery(attempt, envelope, incoming, self)
        if verdict is Verdict.TRUSTED or verdict is Verdict.CONDEMNED:
            self._deliveries.ready(delivery)
        elif verdict is Verdict.SUSPECT:
            self._suspected.add(incoming.tag)
            self._deliveries.suspected(len(self._suspected))
            turn = partial(self._get_ready, delivery)
            self._deliveries.when_prepared(partial(self._suspects.wait, delivery.key, turn))
        elif self._suspects.begin(delivery.key):
            if not self._suspects.arrived(delivery.key, delivery):
                self._start(self._try_alone(delivery), Landing())
        else:
            delivery.is_settled = True
            landing = Landing()
            self._start(self._step_aside(delivery, landing), landing)

    def _refuse(self, incoming: Incoming, envelope: Envelope, error: Undecodable) -> None:
        """Dead-letter what can be carried and not be read."""
        attempt, dead = _unread(incoming, envelope), Dead(Reason.UNDECODABLE, str(error))
        delivery = self._open[incoming.tag] = RabbitmqDelivery(attempt, envelope.without_ours(), incoming, self)
        delivery.settle(dead).then(lambda landing: self._deliveries.refused(attempt, dead, landing))

    def settle(self, delivery: RabbitmqDelivery, outcome: Outcome, landing: Landing) -> None:
        tag = delivery.incoming.tag
        if self._channel.ended.done():
            self._suspects.end(delivery.key)
            landing.set_result(False)
            return
        if delivery.attempt.isolated:
            if delivery.on_trial:
                self._start(self._end_trial(delivery.key, landing), Landing())
            else:
                self._suspects.end(delivery.key)
        match outcome:
            case Done():
                self._done(tag, landing)
            case RetryIn(delay, error):
                headers = {**after_failure(delivery.attempt, delivery.envelope, error), CRASHES: None}
                self._start(self._retry(delivery, landing, headers, delay), landing)
            case Dead():
                self._start(self._bury(delivery, landing, outcome), landing)
            case Released(delay) if delay and not delivery.on_trial:
                self._start(self._give_back_later(delivery, landing, delay), landing)
            case Released() if self._suspects.would_suspect(delivery.envelope, self._deliveries.listener):
                # One more return would begin to look like a crash. A new copy has none.
                crashes = delivery.attempt.crash_count or None
                self._start(self._give_back(delivery, landing, {CRASHES: crashes}), landing)
            case Released():
                self._nack(tag, landing, requeue=True)
            case _:
                assert_never(outcome)

    async def close(self) -> None:
        """Write what is known and let the channel go; what is not settled comes back."""
        self._closing.set()
        await self._end_copies()
        self._flush(patience=0.0)
        if self._words > MOST_UNDER_WAY:
            await self._let_the_queue_hear()
            await self._end_copies()
            self._flush(patience=0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._channel.close()

    async def stop(self) -> None:
        """Take no more. What is on its way comes first: the broker would take it back, and count that as a crash."""
        self._makes_room = False
        with suppress(Lost, TimeoutError):
            await asyncio.sleep(ON_ITS_WAY)
            await self._channel.heard()
            await self._channel.cancel()
            self._words = 0
        self._makes_room = True
        self._flush()

    async def _end_copies(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                while self._tasks:  # one may begin another
                    await asyncio.wait(self._tasks)
        for task, landing in self._tasks.items():
            landing.cancel()
            task.cancel()

    async def _let_the_queue_hear(self) -> None:
        """Wait until the queue has heard everything: RabbitMQ forgets what a closing channel has not handed on yet.

        Only the beginning and the end of a consumer are answered by the queue itself. What comes meanwhile goes back,
        but not before the end, or it would come again.
        """
        arrived: list[Incoming] = []
        with suppress(Lost, TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._channel.consume(self.trial_queue or self.queue, 1, arrived.append)
                await self._channel.heard()
                await self._channel.cancel()
                self._words = 0
                for incoming in arrived:
                    self.take(incoming)

    def _judge(self, envelope: Envelope, message: Message) -> tuple[Verdict, int]:
        """How it is to be met. A copy in a trial queue counts the start that it is there for."""
        if self.trial_queue is not None:
            return Verdict.ON_TRIAL, max(0, (envelope.crashes or 0) - 1)
        return self._suspects.judge(envelope, (self.queue, message.id), self._deliveries.listener)

    def _is_here(self, delivery: RabbitmqDelivery) -> bool:
        return not delivery.is_settled and delivery.incoming.tag in self._open

    def _get_ready(self, delivery: RabbitmqDelivery) -> bool:
        """It is its turn: its worker sends it to its trial as soon as nothing else runs."""
        if not self._is_here(delivery):
            return False
        self._deliveries.ready(delivery)
        return True

    async def send_to_trial(self, delivery: RabbitmqDelivery) -> RabbitmqDelivery | None:
        """Publish it anew, and wait for the copy."""
        trial_queue = await self._deliveries.trial_queue.name()
        if not self._is_here(delivery) or not self._suspects.send(delivery.key):
            return None
        delivery.is_settled = True
        landing = Landing()
        with self._suspects.expecting(delivery.key) as arrival:
            try:
                publishing = self._start(self._publish_for_trial(delivery, landing, trial_queue), landing)
                async with asyncio.timeout(ARRIVES_WITHIN if trial_queue is None else trials.ARRIVES_WITHIN):
                    await asyncio.wait([arrival])
                    if arrival.result().tray.trial_queue is None:
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

    async def _publish_for_trial(self, delivery: RabbitmqDelivery, landing: Landing, trial_queue: str | None) -> None:
        """The copy is safe before the delivery is acknowledged, and that is read before the listener may be called."""
        crashes = delivery.attempt.crash_count
        counted = self._parcel(delivery, {CRASHES: crashes + 1})
        if trial_queue is not None and await self._deliveries.courier.to_trial(counted, trial_queue):
            self._done(delivery.incoming.tag, landing)
        else:
            await self._retry(delivery, landing, {CRASHES: crashes, ON_TRIAL: True}, NO_DELAY)
        self._flush(patience=0.0)
        self._suspects.sent(delivery.key)
        with suppress(Lost, TimeoutError):
            await self._channel.heard()

    async def _try_alone(self, delivery: RabbitmqDelivery) -> None:
        """Have it ready when all other suspects are back at the broker."""
        await asyncio.sleep(ALONE_AFTER)
        await self._suspects.alone()
        self._deliveries.ready(delivery)

    async def trial_ended(self, delivery: RabbitmqDelivery) -> None:
        """Wait until the broker knows how a trial ended."""
        await self._suspects.ended(delivery.key)

    async def _end_trial(self, key: Key, landing: Landing) -> None:
        """The next one is tried when the broker knows how this one ended: its crash would count for both."""
        try:
            self._flush(patience=0.0)
            await landing
            with suppress(Lost, TimeoutError):
                await self._channel.heard()
        finally:
            self._suspects.end(key)

    async def _step_aside(self, delivery: RabbitmqDelivery, landing: Landing) -> None:
        """Another one is tried: back to the broker, and no longer on trial."""
        with self._suspects.leaving():
            await self._retry(delivery, landing, {CRASHES: delivery.attempt.crash_count}, NO_DELAY)
            self._flush(patience=0.0)
            await self._channel.heard()

    # How deliveries end.

    async def _retry(
        self, delivery: RabbitmqDelivery, landing: Landing, headers: dict[str, object], delay: timedelta
    ) -> None:
        if await self._deliveries.courier.back(self._parcel(delivery, headers), delay):
            self._done(delivery.incoming.tag, landing)
        else:
            await self._reject(delivery, landing)

    async def _bury(self, delivery: RabbitmqDelivery, landing: Landing, outcome: Dead) -> None:
        headers = of_dead_letter(delivery.attempt, delivery.envelope, self.queue, outcome)
        if await self._deliveries.courier.to_the_dead(self._parcel(delivery, headers)):
            self._done(delivery.incoming.tag, landing)
        else:
            await self._reject(delivery, landing)

    async def _reject(self, delivery: RabbitmqDelivery, landing: Landing) -> None:
        """No copy of it fits: the broker moves it to the dead letters, or, if it cannot, its body goes there alone."""
        tag = delivery.incoming.tag
        if delivery.envelope.rejectable(delivery.incoming.exchange):
            self._nack(tag, landing, requeue=False)
            return
        attempt, bare = delivery.attempt, delivery.envelope.bare()
        dead = Dead(
            Reason.UNDECODABLE, "neither a copy of its headers nor its x-death can be carried: they are left out"
        )
        headers = of_dead_letter(attempt, bare, self.queue, dead)
        if await self._deliveries.courier.to_the_dead(Parcel(self.queue, attempt.message, bare, headers)):
            self._done(tag, landing)
        else:
            landing.set_result(False)  # it stays in the queue, unacknowledged

    async def _give_back(self, delivery: RabbitmqDelivery, landing: Landing, headers: dict[str, object]) -> None:
        if self.trial_queue is not None:
            await self._retry(delivery, landing, headers, NO_DELAY)  # to leave it here would count as a crash
        elif await self._deliveries.courier.back_at_once(self._parcel(delivery, headers)):
            self._done(delivery.incoming.tag, landing)
        else:
            self._nack(delivery.incoming.tag, landing, requeue=True)

    async def _give_back_later(self, delivery: RabbitmqDelivery, landing: Landing, delay: timedelta) -> None:
        """Behind a delay, because what is held here takes up the prefetch. Where there is no delay it is held."""
        headers: dict[str, object] = {CRASHES: delivery.attempt.crash_count or None}
        if await self._deliveries.courier.back_later(self._parcel(delivery, headers), delay):
            self._done(delivery.incoming.tag, landing)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(delay.total_seconds()):
                await self._closing.wait()
        await self._give_back(delivery, landing, headers)

    def _parcel(self, delivery: RabbitmqDelivery, headers: dict[str, object]) -> Parcel:
        return Parcel(self._deliveries.queue, delivery.attempt.message, delivery.envelope, headers)

    def _start(self, ending: Coroutine[Any, Any, None], landing: Landing) -> asyncio.Task[None]:
        task = asyncio.create_task(ending, name=f"outbox end of a delivery of {self._deliveries.queue}")
        self._tasks[task] = landing
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            self._channel.retire(f"a delivery could not be settled: {task.exception()}")  # it comes back

    def _done(self, tag: int, landing: Landing) -> None:
        if self._open.pop(tag, None) is None:
            landing.set_result(False)
            return
        if tag in self._suspected:
            self._suspected.discard(tag)
            self._deliveries.suspected(len(self._suspected))
        elif self.trial_queue is None:
            self._deliveries.settled()
        self._acknowledgements.done(tag, landing, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(SETTLE_WITHIN, self._flush)
        elif self._timer.when() - self._loop.time() > IMPATIENCE and self._patience < PATIENCE:
            self._timer.cancel()
            self._timer = self._loop.call_later(IMPATIENCE, self._flush)

    @property
    def _patience(self) -> float:
        return self._acknowledgements.patience(self._deliveries.prefetch)

    def _nack(self, tag: int, landing: Landing, *, requeue: bool) -> None:
        known = self._open.pop(tag, None) is not None
        if known:
            if tag in self._suspected:
                self._suspected.discard(tag)
                self._deliveries.suspected(len(self._suspected))
            self._acknowledgements.settled(tag)
            self._say((), [(tag, requeue)])
        landing.set_result(known)

    def _say(self, acks: Sequence[tuple[int, bool]], nacks: Sequence[tuple[int, bool]] = ()) -> None:
        self._words += len(acks) + len(nacks)
        self._channel.settle(acks, nacks)

    def _flush(self, patience: float | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel.ended.done() or not self._makes_room:
            return
        words = self._acknowledgements.words(self._loop.time(), self._patience if patience is None else patience)
        if words.acks:
            self._say(words.acks)
        for landing in words.landings:
            landing.set_result(True)
        if self._acknowledgements.waiting:
            self._timer = self._loop.call_later(self._patience, self._flush)

    def _lost(self) -> None:
        """The channel is gone, and with it every hold on what it delivered."""
        lost, self._open = self._open, {}  # before any of them has its turn
        forgive = self._suspects.forgive if self.trial_queue is None else self._suspects.forgive_trial
        for delivery in lost.values():
            forgive(delivery.envelope, delivery.key)
            self._suspects.end(delivery.key)
        for landing in self._acknowledgements.abandon():
            landing.set_result(False)
        for task, landing in self._tasks.items():
            landing.set_result(False)
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._deliveries.lost(self)


class RabbitmqDeliveries:
    """The deliveries of one listener's queue."""

    def __init__(
        self,
        listener: Listener,
        queue: str,
        prefetch: int,
        *,
        link: Link,
        courier: Courier,
        suspects: Suspects,
        declare: Callable[[], Awaitable[None]],
        observe: Observer,
        trays: set[Tray],
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self.listener = listener
        self.largest_body = largest_body  # bytes
        self.queue = queue
        self.courier = courier
        self.suspects = suspects
        most = min(prefetch, MOST_PREFETCH)
        # What waits for its lane is in hand too: with little in hand, one lane would keep all others from coming.
        self._appetite = Appetite(listener.appetite if listener.lane is None else most, most, time.monotonic())
        self._link = link
        self._declare = declare
        self._observe = observe
        self._consuming = Outage(f"consumer of {queue}", TRANSPORT, observe)
        self.trial_queue = TrialQueue(queue, link=link, courier=courier, reader=self._trial_reader)
        self._trays = trays  # of the whole transport, which closes them
        self._tray: Tray | None = None
        self._trial_tray: Tray | None = None
        self._ready: deque[RabbitmqDelivery] = deque()
        self._arrived = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[str | None] | None = None
        self._changing: asyncio.Future[None] | None = None
        self._closed = False

    def __aiter__(self) -> RabbitmqDeliveries:
        return self

    async def __anext__(self) -> RabbitmqDelivery:
        if self._keeping is None and not self._closed:
            self._keeping = asyncio.create_task(self._keep(), name=f"outbox consumer of {self.queue}")
        while (delivery := self.take()) is None:
            if self._keeping is None or self._closed:
                raise StopAsyncIteration
            if self._keeping.done():
                self._keeping.result()  # raises what ended it
            self._arrived.clear()
            await self._arrived.wait()
        return delivery

    def take(self) -> RabbitmqDelivery | None:
        """The next one that did not expire, if it is there."""
        while self._ready:
            delivery = self._ready.popleft()
            if not delivery.expired:
                return delivery
            delivery.settle(Dead(Reason.EXPIRED, "its expiration passed before a listener took it"))
        return None

    async def aclose(self) -> None:
        """Consume no more and give back what nobody took. Deliveries that were taken stay until they are settled."""
        self._closed = True
        self._arrived.set()
        if self._preparing is not None:
            self._preparing.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping, *([] if self._changing is None else [self._changing])])
        tray = self._tray
        if tray is not None:
            await tray.stop()
        while self._ready:
            self._ready.popleft().settle(Released())
        for each in (tray, self._trial_tray):
            if each is not None and each.idle:
                await self._close(each)

    def ready(self, delivery: RabbitmqDelivery) -> None:
        if self._closed:
            delivery.settle(Released())
        else:
            self._ready.append(delivery)
            self._arrived.set()

    @property
    def prefetch(self) -> int:
        """How many unacknowledged deliveries the broker allows, but for suspected ones that wait."""
        return self._appetite.prefetch

    def refused(self, attempt: Attempt, dead: Dead, landing: Landing | None = None) -> None:
        """Tell of a message that no listener was called for."""
        if landing is None or (not landing.cancelled() and landing.result()):
            self._observe(Handled(self.listener.queue, attempt, dead, NO_DELAY))

    def settled(self) -> None:
        self._appetite.digested(time.monotonic())

    def suspected(self, count: int) -> None:
        """So many wait to be tried."""
        self._appetite.waiting(count)

    def when_prepared(self, line_up: Callable[[], None]) -> None:
        """Have the queue for trials ready, and then a suspected message wait for its turn."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self.trial_queue.name(), name=f"outbox trials of {self.queue}")
        if self._preparing.done():
            line_up()
        else:
            self._preparing.add_done_callback(lambda _: line_up())

    def lost(self, tray: Tray) -> None:
        """What came by this channel comes again by another."""
        self._ready = deque(delivery for delivery in self._ready if delivery.tray is not tray)
        self._trays.discard(tray)
        if self._tray is tray:
            self._tray = None
        if self._trial_tray is tray:
            self._trial_tray = None

    def _trial_reader(self, channel: Channel, name: str) -> Callable[[Incoming], object]:
        tray = self._trial_tray = Tray(channel, self, name)
        self._trays.add(tray)
        return tray.take

    async def _close(self, tray: Tray) -> None:
        await tray.close()
        self._trays.discard(tray)

    async def _keep(self) -> None:
        """Consume; after every end, consume again."""
        pace = Pace(LONGEST_PAUSE, SHORTEST_PAUSE)
        try:
            while True:
                try:
                    raise await self._consume(pace)
                except TransportClosed:
                    raise
                except TransportUnavailable:
                    await asyncio.sleep(pace.pause())  # its connection tells why
                except Exception as error:  # noqa: BLE001 - a consumer outlives whatever its broker does
                    pause = pace.pause()
                    self._consuming.struck(error, timedelta(seconds=pause))
                    await asyncio.sleep(pause)
        finally:
            self._arrived.set()

    async def _consume(self, pace: Pace) -> Exception:
        """From one beginning to its end, and why it ended."""
        wire = await self._link.wire(within=LONGEST_PAUSE)
        channel = await wire.channel()
        tray = self._tray = Tray(channel, self)
        self._trays.add(tray)
        try:
            self._appetite.waiting(0)
            in_hand = self._appetite.in_hand
            await channel.consume(self.queue, in_hand, tray.take)
        except Lost as error:
            if error.ended.code == _NOT_FOUND:
                await self._declare()
            return error
        pace.reset()
        self._consuming.over()
        while not channel.ended.done():
            await _either(channel.ended, self._appetite.changed)
            self._appetite.changed.clear()
            if not channel.ended.done():
                before, in_hand = in_hand, self._appetite.in_hand
                self._changing = asyncio.ensure_future(self._change(channel, tray, before, in_hand))
                await asyncio.shield(self._changing)  # to be cut here would cost the channel, and what is on it
        return Lost(channel.ended.result())

    async def _change(self, channel: Channel, tray: Tray, before: int, after: int) -> None:
        """Have more in hand by a further consumer; have less by beginning anew.

        What is on its way to a consumer that ends goes back, and by the broker's count that looks like a crash.
        """
        with suppress(Lost, TimeoutError):
            if after < before:
                await tray.stop()
                before = 0
            if after > before:
                await channel.consume(self.queue, after - before, tray.take)


async def _either(ended: asyncio.Future[Any], changed: asyncio.Event) -> None:
    changing = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([ended, changing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()


def _unread(incoming: Incoming, envelope: Envelope | None = None) -> Attempt:
    """What stands for a message whose headers nobody can read."""
    message_id = (envelope.text("message_id") if envelope else None) or new_id()
    message = Message(
        routing_key=incoming.routing_key, body=incoming.body, content_type=BYTES, tracking_ids=(message_id,)
    )
    return Attempt(message, 1, incoming.tag)
