"""RabbitmqTransport: publishes to a topic exchange and delivers from quorum queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Self, TypeVar

import aiormq
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from outbox.core.binding import Binding
from outbox.core.diagnosis import Finding, fresh_dead_letters
from outbox.core.durations import NO_DELAY
from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable, WrongEventLoop
from outbox.core.events import Advised
from outbox.core.listener import Listener
from outbox.core.loops import cancelled_from_outside
from outbox.core.message import Message
from outbox.core.store import QueueBacklog
from outbox.core.transport import (
    Defaults,
    Features,
    Health,
    Provisioning,
    Published,
    Refusal,
    Report,
    Transport,
    unreported,
)
from outbox.transports.rabbitmq import counting
from outbox.transports.rabbitmq.channel import Lost
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.connection import SupervisedConnection
from outbox.transports.rabbitmq.connection_health import HealthProbe
from outbox.transports.rabbitmq.connection_recovery import taking_messages
from outbox.transports.rabbitmq.consumer import RabbitmqConsumer
from outbox.transports.rabbitmq.dead_letters import BrokerAccess, RabbitmqDeadLetters
from outbox.transports.rabbitmq.declaring import OpenChannel, ReopeningChannel, declare, declare_for
from outbox.transports.rabbitmq.doctor import alarm, examine
from outbox.transports.rabbitmq.endpoint import Endpoint
from outbox.transports.rabbitmq.lost_runs import LostRuns
from outbox.transports.rabbitmq.management import ManagementAway, bindings_of_listeners, dead_letter_queues, see
from outbox.transports.rabbitmq.options import RabbitmqOptions
from outbox.transports.rabbitmq.poison import PoisonSuspects
from outbox.transports.rabbitmq.provisioning import provisioning
from outbox.transports.rabbitmq.publishing import CONFIRMED_WITHIN, BatchPublisher, Result
from outbox.transports.rabbitmq.republishing import Republisher
from outbox.transports.rabbitmq.sending import outgoing, why_unsendable
from outbox.transports.rabbitmq.topology import Names, Topology, open_ended
from outbox.transports.rabbitmq.topology import server_version as parsed_version
from outbox.transports.rabbitmq.unacknowledged import Unacknowledged

START_WITHIN = 10.0  # seconds that a worker's start waits for a broker that is away

DEFAULTS = Defaults()

T = TypeVar("T")


class RabbitmqTransport(Transport):
    """One connection for publishing and one for consuming: a broker that blocks publishers takes acknowledgements."""

    name = counting.NAME
    features = Features(knows_health=True, counts_queues=True, changes_bindings=True, describes_topology=True)
    dead_letters: RabbitmqDeadLetters

    def __init__(
        self,
        where: str | URL | AbstractConnection,
        defaults: Defaults = DEFAULTS,
        *,
        by_hand: bool = True,  # frames written and read here; never on a connection that was given
        answer_within: float = CONFIRMED_WITHIN,  # seconds for the answers to a batch; then its channel is given up
    ) -> None:
        options = defaults.chosen(RabbitmqOptions)
        self._endpoint = Endpoint(where, defaults.observe, by_hand=by_hand)
        self.address = self._endpoint.address
        self._answer_within = answer_within
        self._names = Names(options.exchange_name, options.queue_prefix)
        self._retry_policy = defaults.retry_policy
        self._largest_body = defaults.max_body_size
        self._observe = defaults.observe
        self._opened = 0  # a relay and a worker of one process share this transport
        self._loop: asyncio.AbstractEventLoop | None = None  # whose connections they are while it is open
        self._all_unacknowledged: set[Unacknowledged] = set()
        self._listeners: dict[str, Listener] = {}  # by queue: delays are shared, so all are declared whenever one is
        self._management_url = options.rabbitmq_management_url
        self._counting: counting.Counting | None = None  # while a command watches
        self.dead_letters = RabbitmqDeadLetters(self._names, self._hands, self._queues, self._largest_body)

    @classmethod
    def of(cls, where: str | AbstractConnection, defaults: Defaults) -> Self:
        """`amqp://user:password@host:5672/virtual-host`, `amqps://…`, or a connection of aio-pika's."""
        return cls(where, defaults)

    def adopt(self, defaults: Defaults) -> None:
        self._management_url = self._management_url or defaults.chosen(RabbitmqOptions).rabbitmq_management_url

    async def open(self) -> None:
        """Connect. A broker that is away is waited for when it is needed; one that refuses us is told at once."""
        self._opened += 1
        if self._opened == 1:
            self._loop = asyncio.get_running_loop()
            self._publisher_connection = publisher = self._endpoint.supervised("publisher")
            is_given = self._endpoint.given is not None
            self._consumer_connection = publisher if is_given else self._endpoint.supervised("consumer")
            self._publishing = BatchPublisher(self._publisher_connection, within=self._answer_within)
            # On a channel of their own: the first use of a delay closes it, and what is on its way there is sent again.
            self._returning = BatchPublisher(self._publisher_connection, within=self._answer_within)
            self._republisher = Republisher(
                self._returning, self._names, partial(self._make, self._publisher_connection), self._observe
            )
            self._suspects, self._lost_runs = PoisonSuspects(), LostRuns()
        await self._publisher_connection.open()

    async def close(self) -> None:
        """Write the outcomes that are known and give back the rest."""
        self._opened -= 1
        if self._opened:
            return
        await asyncio.gather(*(each.close() for each in self._all_unacknowledged), return_exceptions=True)
        self._all_unacknowledged.clear()
        await self._republisher.close()
        await self._returning.close()
        await self._publishing.close()
        await self._publisher_connection.close()
        await self._consumer_connection.close()

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        batch: list[Outgoing] = []
        refused: dict[str, Refusal] = {}
        exchange = self._names.exchange_name
        for message in messages:
            try:
                batch.append(outgoing(exchange, message))
            except Exception as error:  # noqa: BLE001 - one message that cannot be written takes no other with it
                refused[message.id] = Refusal(why_unsendable(error), permanent=True)
        results = await self._published(batch) if batch else []
        confirmed = []
        for sent, result in zip(batch, results, strict=True):
            if result is BrokerAnswer.CONFIRMED:
                confirmed.append(sent.id)
            elif result is BrokerAnswer.RETURNED:
                refused[sent.id] = Refusal(f"no queue is bound to {sent.routing_key!r}")
            elif result is BrokerAnswer.REJECTED:
                refused[sent.id] = Refusal("RabbitMQ rejected it: a queue that is bound to it takes no more")
            elif isinstance(result, Refusal):
                refused[sent.id] = result
        return Published(frozenset(confirmed), refused)

    def queue_name(self, queue: str) -> str:
        return self._names.queue(queue)

    async def back(self) -> None:
        await taking_messages(self._publisher_connection)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        self._listeners |= {listener.queue: listener for listener in listeners}
        connection = await self._consumer_connection.connection(within=START_WITHIN)
        topology, declared = await self._declaring(
            declare_for(
                connection.client_channel,
                self._names,
                list(self._listeners.values()),
                self._retry_policy,
                server_version=connection.server_version,
            )
        )
        self._republisher.topology = topology
        self._republisher.writes_dead_letters = declared.dead_letters
        for mismatch in declared.weaker:
            self._observe(Advised("topology", mismatch.advice))

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> list[Binding] | None:
        """The management interface alone tells. At a start it is asked only where a setting says that it is there."""
        if at_start and not self._management_url:
            return None
        return await bindings_of_listeners(
            self._names, queues, self._management_url, self._endpoint.url, within=counting.COUNT_WITHIN
        )

    async def unbind(self, binding: Binding) -> None:
        queue, exchange = self._names.queue(binding.queue), self._names.exchange
        async with self._channels() as open_channel:
            asking = ReopeningChannel(open_channel)
            unbinding = asking.ask(lambda channel: channel.queue_unbind(queue, exchange, binding.binding_key))
            try:
                await self._declaring(unbinding)
            except TransportUnavailable as error:
                if isinstance(error.__cause__, ChannelAccessRefused):
                    raise ConfigurationError(
                        f"this user may not unbind {queue!r} from {exchange!r}: give it the write permission on the "
                        "queue and the read permission on the exchange, or provision the bindings"
                    ) from None
                raise
            await self._declaring(asking.close())

    def consume(self, listener: Listener, prefetch: int) -> RabbitmqConsumer:
        return RabbitmqConsumer(
            listener,
            self._names.queue(listener.queue),
            prefetch,
            supervised=self._consumer_connection,
            republisher=self._republisher,
            suspects=self._suspects,
            lost_runs=self._lost_runs,
            declare=lambda: self.declare([listener]),
            observe=self._observe,
            all_unacknowledged=self._all_unacknowledged,
            largest_body=self._largest_body,
        )

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Health | None]:
        """A connection that was given is its owner's to watch."""
        if self._endpoint.given is not None:
            yield None
            return
        watch = HealthProbe(partial(self._endpoint.connect_by_hand, "watch"))
        self._counting = connected = self._new_counting()
        try:
            yield watch.trouble
        finally:
            self._counting = None
            await connected.close()
            await watch.close()

    async def counted(self, recorded: Collection[str]) -> Sequence[QueueBacklog] | None:
        names, seen = self._names, None
        queues = counting.of_listeners(names, recorded) | {names.queue(queue) for queue in self._listeners}
        if self._management_url and self._endpoint.url:  # which says for which virtual host
            with suppress(ManagementAway):
                seen = await see(self._management_url, self._endpoint.url, within=counting.COUNT_WITHIN)
        if seen is None and not queues:
            return None
        delays = counting.counted_delays(
            names, [self._retry_policy, *(each.retry_policy for each in self._listeners.values())]
        )
        try:
            async with asyncio.timeout(counting.COUNT_WITHIN), self._channels() as open_channel:
                asking = ReopeningChannel(open_channel)
                found = await self._declaring(counting.queue_backlogs(asking, names, queues, delays, seen))
                await self._declaring(asking.close())
                return found
        except (TransportUnavailable, TransportClosed, ConfigurationError, TimeoutError):
            return counting.untold(names, {*queues, *(seen.served(names) if seen is not None else ())})

    async def examine(
        self,
        listeners: Sequence[Listener] = (),
        *,
        recorded: Collection[str] = (),
        stale: Collection[Binding] | None = None,
        fresh: timedelta = NO_DELAY,
        admin_url: str = "",
    ) -> Sequence[Finding]:
        """Beside a connection that was given a further one is made, if it tells where it leads."""
        if not self._endpoint.url:
            return await super().examine(listeners, recorded=recorded, fresh=fresh)
        examined = await examine(
            self._endpoint.text or self._endpoint.url,
            self._names,
            listeners,
            self._retry_policy,
            recorded=recorded,
            stale=stale,
            management_url=admin_url or self._management_url,
            tls=self._endpoint.tls,
        )
        if not examined.reached:
            return examined.findings
        with_letters, there = [found.queue for found in examined.queues if found.dead != 0], "in RabbitMQ's queues"
        known = any(found.dead for found in examined.queues)
        letters = (
            await fresh_dead_letters(self.dead_letters, with_letters, fresh, there, known=known)
            if examined.queues
            else []
        )
        async with self.watched() as asked:
            return [*examined.findings, *letters, *(alarm(await asked()) if asked else ())]

    async def server_version(self) -> str:
        """The broker's own word, over a connection for this question alone."""
        if self._endpoint.given is not None:
            return ""
        async with asyncio.timeout(START_WITHIN):
            connection = await self._endpoint.connect_by_hand("topology")
        try:
            return ".".join(map(str, connection.server_version or ()))
        finally:
            await connection.close()

    def topology(
        self,
        listeners: Sequence[Listener],
        *,
        virtual_host: str = "",
        server_version: str = "",
        users: Mapping[str, str] | None = None,
    ) -> Provisioning:
        delays, version = self._retry_policy.known_delays() or (), parsed_version(server_version)
        steps = any(open_ended(listener, self._retry_policy) for listener in listeners)
        needed = Topology.of(self._names, listeners, delays, server_version=version, steps=steps, way_back=True)
        return provisioning(needed, virtual_host or self._endpoint.virtual_host, users or {})

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[OpenChannel]:
        """Where questions are asked: on a connection of their own, which is that of the command that watches."""
        if self._counting is not None:
            yield self._counting.channel
        elif self._endpoint.given is not None:
            async with self._hands() as hands:
                yield hands.connection.client_channel
        else:
            connected = self._new_counting()
            try:
                yield connected.channel
            finally:
                await connected.close()

    def _new_counting(self) -> counting.Counting:
        return counting.Counting(partial(self._endpoint.connect_by_hand, "count"))

    @asynccontextmanager
    async def _hands(self) -> AsyncIterator[BrokerAccess]:
        """For those who may look without a relay or a worker having opened anything."""
        self._check_loop()
        try:
            await self.open()
            yield BrokerAccess(await self._consumer_connection.connection(), self._publishing)
        finally:
            await self.close()

    def _check_loop(self) -> None:
        """Refuse the connections of another event loop, unless that has ended without closing them."""
        if not self._opened or self._loop is None or self._loop is asyncio.get_running_loop():
            return
        if not self._loop.is_closed():
            raise WrongEventLoop(
                "the connections to RabbitMQ are those of another event loop, in which a relay or a worker of this "
                "outbox is at work: use dead letters in that loop, or make an Outbox for each loop"
            )
        self._opened = 0
        self._all_unacknowledged.clear()

    async def _queues(self, named: Collection[str], with_letters: Collection[str] = ()) -> Collection[str]:
        """Whose dead letters there may be: those named or declared here, or all if the management interface lists them.

        `with_letters` are known to have some: these are read even if the interface that was set does not answer.
        """
        known = {*named, *with_letters, *self._listeners}
        if known and not (self._management_url and self._endpoint.url):
            return sorted(known)
        try:
            if not self._endpoint.url:
                raise ManagementAway("the connection that was given does not tell its virtual host")
            return await dead_letter_queues(self._management_url, self._endpoint.url, self._names)
        except ManagementAway as error:
            if with_letters:
                return sorted(known)
            raise ConfigurationError(
                f"RabbitMQ's management interface does not list the queues ({error}): name one queue, an "
                "empty one for the relay's own letters, or set rabbitmq_management_url"
            ) from None

    async def _published(self, batch: list[Outgoing]) -> list[Result]:
        results = await self._publishing.publish(batch)
        missing = [position for position, result in enumerate(results) if result is BrokerAnswer.MISSING]
        if missing:
            await self._make(self._publisher_connection, Topology.of_relay(self._names))
            again = await self._publishing.publish([batch[position] for position in missing])
            for position, result in zip(missing, again, strict=True):
                results[position] = result
        if BrokerAnswer.FORBIDDEN in results:
            raise TransportUnavailable(
                f"this user may not publish to the exchange {self._names.exchange!r}: give it the write permissions "
                "that `outbox topology` prints"
            )
        return results

    async def _make(self, supervised: SupervisedConnection, topology: Topology) -> None:
        connection = await supervised.connection()
        await self._declaring(declare(connection.client_channel, topology))

    async def _declaring(self, declaring: Awaitable[T]) -> T:
        try:
            return await declaring
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            raise TransportUnavailable("RabbitMQ fell silent while its queues were declared") from None
        except (Lost, TimeoutError, RuntimeError, aiormq.exceptions.AMQPError) as error:
            raise TransportUnavailable(f"RabbitMQ went away while its queues were declared: {error}") from error
