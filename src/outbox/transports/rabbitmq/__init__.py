"""RabbitmqTransport: publishes to a topic exchange and delivers from quorum queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Self, TypeVar

import aiormq
from aio_pika.abc import AbstractConnection, AbstractRobustConnection
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from outbox.core.binding import LONGEST_KEY, Binding
from outbox.core.cancellation import cancelled_from_outside
from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable
from outbox.core.events import Advised
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import QueueBacklog
from outbox.core.transport import Defaults, Features, Published, Refusal, Trouble
from outbox.core.urls import check_credentials
from outbox.transports.rabbitmq.carrying import Courier
from outbox.transports.rabbitmq.channels import Lost, Wire
from outbox.transports.rabbitmq.confirms import Answer, Outgoing
from outbox.transports.rabbitmq.consuming import RabbitmqDeliveries, Tray
from outbox.transports.rabbitmq.counting import COUNT_WITHIN, NAME, Counting, of_listeners, queue_backlogs, untold
from outbox.transports.rabbitmq.dead_letters import Hands, RabbitmqDeadLetters
from outbox.transports.rabbitmq.declaring import Asking, OpenChannel, declare, declare_for
from outbox.transports.rabbitmq.frames import FrameWire
from outbox.transports.rabbitmq.link import Connect, Link, refusal
from outbox.transports.rabbitmq.management import ManagementAway, bindings_of, dead_letter_queues, see
from outbox.transports.rabbitmq.plain import PlainWire
from outbox.transports.rabbitmq.properties import LARGEST_PROPERTIES, Unsendable
from outbox.transports.rabbitmq.publishing import ANSWER_WITHIN, Publishing, Result
from outbox.transports.rabbitmq.quieting import supervised
from outbox.transports.rabbitmq.returning import taking_messages
from outbox.transports.rabbitmq.sending import encoded
from outbox.transports.rabbitmq.suspects import Suspects
from outbox.transports.rabbitmq.topology import LONGEST_DELAY, Names, Topology
from outbox.transports.rabbitmq.watching import Watch

HEARTBEAT = 10  # seconds, if the URL has none: a connection that is silent for three times as long is dead
START_WITHIN = 10.0  # seconds that a worker's start waits for a broker that is away
_SURELY_SHORT = LONGEST_KEY // 4  # characters, none of which has more than four bytes

DEFAULTS = Defaults()

T = TypeVar("T")


class RabbitmqTransport:
    """One connection for publishing and one for consuming: a broker that blocks publishers takes acknowledgements."""

    name = NAME
    features = Features()

    def __init__(
        self,
        where: str | URL | AbstractConnection,
        defaults: Defaults = DEFAULTS,
        *,
        by_hand: bool = True,  # frames written and read here; never on a connection that was given
        answer_within: float = ANSWER_WITHIN,  # seconds for the answers to a batch; then its channel is given up
    ) -> None:
        self._given = where if isinstance(where, AbstractConnection) else None
        self._url = None if isinstance(where, AbstractConnection) else _parsed(where)
        self._by_hand = by_hand
        self._answer_within = answer_within
        self._names = Names(defaults.exchange_name, defaults.queue_prefix)
        self._retry_policy = defaults.retry_policy
        self._largest_body = defaults.max_body_size
        self._observe = defaults.observe
        self._opened = 0  # a relay and a worker of one process share this transport
        self._trays: set[Tray] = set()
        self._listeners: dict[str, Listener] = {}  # by queue: delays are shared, so all are declared whenever one is
        self._management_url = defaults.management_url
        self._counting: Counting | None = None  # while somebody watches
        self.dead_letters = RabbitmqDeadLetters(self._names, self._hands, self._queues, self._largest_body)

    @classmethod
    def of(cls, where: str | AbstractConnection, defaults: Defaults) -> Self:
        """`amqp://user:password@host:5672/virtual-host`, `amqps://…`, or a connection of aio-pika's."""
        return cls(where, defaults)

    async def open(self) -> None:
        """Connect. A broker that is away is waited for when it is needed; one that refuses us is told at once."""
        self._opened += 1
        if self._opened == 1:
            self._publisher_link = self._link("publisher")
            self._consumer_link = self._publisher_link if self._given is not None else self._link("consumer")
            self._publishing = Publishing(self._publisher_link, within=self._answer_within)
            # On a channel of their own: the first use of a delay closes it, and what is on its way there is sent again.
            self._returning = Publishing(self._publisher_link, within=self._answer_within)
            self._courier = Courier(
                self._returning, self._names, partial(self._make, self._publisher_link), self._observe
            )
            self._suspects = Suspects()
        await self._publisher_link.open()

    async def close(self) -> None:
        """Write the outcomes that are known and give back the rest."""
        self._opened -= 1
        if self._opened:
            return
        await asyncio.gather(*(tray.close() for tray in self._trays), return_exceptions=True)
        self._trays.clear()
        await self._courier.close()
        await self._returning.close()
        await self._publishing.close()
        await self._publisher_link.close()
        await self._consumer_link.close()

    async def publish(self, messages: Sequence[Message]) -> Published:
        batch: list[Outgoing] = []
        refused: dict[str, Refusal] = {}
        exchange = self._names.exchange
        for message in messages:
            try:
                batch.append(_outgoing(exchange, message))
            except Exception as error:  # noqa: BLE001 - one message that cannot be written takes no other with it
                refused[message.id] = Refusal(_unsendable(error), permanent=True)
        results = await self._published(batch) if batch else []
        confirmed = []
        for outgoing, result in zip(batch, results, strict=True):
            if result is Answer.CONFIRMED:
                confirmed.append(outgoing.id)
            elif result is Answer.RETURNED:
                refused[outgoing.id] = Refusal(f"no queue is bound to {outgoing.routing_key!r}")
            elif result is Answer.REJECTED:
                refused[outgoing.id] = Refusal("RabbitMQ rejected it: a queue that is bound to it takes no more")
            elif isinstance(result, Refusal):
                refused[outgoing.id] = result
        return Published(frozenset(confirmed), refused)

    def queue_name(self, queue: str) -> str:
        return self._names.queue(queue)

    @property
    def address(self) -> str:
        """The broker and its virtual host; nothing for a connection that does not tell."""
        url: URL | None = self._url or getattr(self._given, "url", None)
        if url is None:
            return ""
        port = url.port or (5671 if url.scheme == "amqps" else 5672)
        return f"{url.scheme}://{url.host}:{port}{url.path or '/'}"

    async def back(self) -> None:
        await taking_messages(self._publisher_link)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        self._listeners |= {listener.queue: listener for listener in listeners}
        wire = await self._consumer_link.wire(within=START_WITHIN)
        topology, declared = await self._declaring(
            declare_for(
                wire.client_channel,
                self._names,
                list(self._listeners.values()),
                self._retry_policy,
                server_version=wire.server_version,
            )
        )
        self._courier.topology = topology
        self._courier.writes_dead_letters = declared.dead_letters
        for mismatch in declared.weaker:
            advice = f"{mismatch}: a broker that crashes may lose a message there. When it is empty: {mismatch.way_out}"
            self._observe(Advised("topology", advice))

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> list[Binding] | None:
        """The management interface alone tells. At a start it is asked only where a setting says that it is there."""
        if at_start and not self._management_url:
            return None
        listeners = {self._names.queue(queue): queue for queue in queues}
        try:
            found = await bindings_of(listeners, self._management_url, str(self._url or ""), within=COUNT_WITHIN)
        except ManagementAway as error:
            raise ConfigurationError(
                f"RabbitMQ's management interface does not tell what queues are bound to ({error}): set "
                "rabbitmq_management_url"
            ) from None
        ours = (each for each in found if each.exchange == self._names.exchange)
        return [Binding(listeners[each.queue], each.routing_key) for each in ours]

    async def unbind(self, binding: Binding) -> None:
        queue, exchange = self._names.queue(binding.queue), self._names.exchange
        async with self._channels() as open_channel:
            asking = Asking(open_channel)
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

    def consume(self, listener: Listener, prefetch: int) -> RabbitmqDeliveries:
        return RabbitmqDeliveries(
            listener,
            self._names.queue(listener.queue),
            prefetch,
            link=self._consumer_link,
            courier=self._courier,
            suspects=self._suspects,
            declare=lambda: self.declare([listener]),
            observe=self._observe,
            trays=self._trays,
            largest_body=self._largest_body,
        )

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Trouble]:
        """A connection that was given is its owner's to watch."""
        if self._given is not None:
            yield _unknown
            return
        watch = Watch(partial(self._connected_by_hand, "watch"))
        self._counting = counting = self._new_counting()
        try:
            yield watch.trouble
        finally:
            self._counting = None
            await counting.close()
            await watch.close()

    async def counted(self, recorded: Collection[str]) -> Sequence[QueueBacklog] | None:
        names, seen = self._names, None
        queues = of_listeners(names, recorded) | {names.queue(queue) for queue in self._listeners}
        if self._management_url:
            with suppress(ManagementAway):
                seen = await see(self._management_url, str(self._url or ""), within=COUNT_WITHIN)
        if seen is None and not queues:
            return None
        delays = [names.delay(each) for each in self._retry_policy.known_delays() or () if each <= LONGEST_DELAY]
        try:
            async with asyncio.timeout(COUNT_WITHIN), self._channels() as open_channel:
                asking = Asking(open_channel)
                found = await self._declaring(queue_backlogs(asking, names, queues, delays, seen))
                await self._declaring(asking.close())
                return found
        except (TransportUnavailable, ConfigurationError, TimeoutError):
            return untold(names, queues)

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[OpenChannel]:
        """Where questions are asked: on a connection of their own, which is that of whoever watches."""
        if self._counting is not None:
            yield self._counting.channel
        elif self._given is not None:
            async with self._hands() as hands:
                yield hands.wire.client_channel
        else:
            counting = self._new_counting()
            try:
                yield counting.channel
            finally:
                await counting.close()

    def _new_counting(self) -> Counting:
        return Counting(partial(self._connected_by_hand, "count"))

    @asynccontextmanager
    async def _hands(self) -> AsyncIterator[Hands]:
        """For those who may look without a relay or a worker having opened anything."""
        try:
            await self.open()
            yield Hands(await self._consumer_link.wire(), self._publishing)
        finally:
            await self.close()

    async def _queues(self, named: Collection[str]) -> Collection[str]:
        """Whose dead letters there may be: those named or declared here, unless somebody knows all of them."""
        known = {*named, *self._listeners}
        if known and not self._management_url:
            return sorted(known)
        try:
            return await dead_letter_queues(self._management_url, str(self._url or ""), self._names)
        except ManagementAway as error:
            raise ConfigurationError(
                f"RabbitMQ's management interface does not list the queues ({error}): name one queue, an "
                "empty one for the relay's own letters, or set rabbitmq_management_url"
            ) from None

    async def _published(self, batch: list[Outgoing]) -> list[Result]:
        results = await self._publishing.publish(batch)
        missing = [position for position, result in enumerate(results) if result is Answer.MISSING]
        if missing:
            await self._make(self._publisher_link, Topology.of_relay(self._names))
            again = await self._publishing.publish([batch[position] for position in missing])
            for position, result in zip(missing, again, strict=True):
                results[position] = result
        if Answer.FORBIDDEN in results:
            raise TransportUnavailable(
                f"this user may not publish to the exchange {self._names.exchange!r}: give it the write permissions "
                "that `outbox topology` prints"
            )
        return results

    async def _make(self, link: Link, topology: Topology) -> None:
        wire = await link.wire()
        await self._declaring(declare(wire.client_channel, topology))

    async def _declaring(self, declaring: Awaitable[T]) -> T:
        try:
            return await declaring
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            raise TransportUnavailable("RabbitMQ fell silent while its queues were declared") from None
        except (Lost, TimeoutError, RuntimeError, aiormq.exceptions.AMQPError) as error:
            raise TransportUnavailable(f"RabbitMQ went away while its queues were declared: {error}") from error

    def _link(self, role: str) -> Link:
        connect: Connect = self._connected_given if self._given is not None else partial(self._connected, role)
        return Link(connect, name=f"RabbitMQ {role}", observe=self._observe)

    async def _connected(self, role: str) -> Wire:
        if self._by_hand:
            return await self._connected_by_hand(role)
        with self._explained() as url:
            connection = aiormq.Connection(url)
            await connection.connect()
            return PlainWire(connection, ours=True)

    async def _connected_by_hand(self, role: str) -> FrameWire:
        with self._explained() as url:
            return await FrameWire.connect(url, f"outbox {role}")

    @contextmanager
    def _explained(self) -> Iterator[URL]:
        url = self._url
        assert url is not None  # noqa: S101 - a transport without one was given a connection
        try:
            with supervised():
                yield url
        except Exception as error:  # noqa: BLE001 - what it means is told without the URL
            raise refusal(error, f"RabbitMQ at {url.host}:{url.port}") from None

    async def _connected_given(self) -> Wire:
        given = self._given
        assert given is not None  # noqa: S101 - a transport without one was given a URL
        comes_back = isinstance(given, AbstractRobustConnection)
        if given.is_closed or (not comes_back and not given.connected.is_set()):
            raise TransportClosed("the connection to RabbitMQ that was given as rmq_connection is closed for good")
        await given.connected.wait()
        if given.transport is None:
            raise TransportUnavailable("the connection that was given is not open")
        return PlainWire(given.transport.connection)


async def _unknown() -> str | None:
    return None


def _parsed(text: str | URL) -> URL:
    """An error does not repeat the URL: it may hold a password."""
    check_credentials(str(text), "rabbitmq_url")
    try:
        url = URL(text)
        port = url.port
    except ValueError:
        url, port = URL(""), None
    if url.scheme not in ("amqp", "amqps") or not url.host:
        raise ConfigurationError(
            "rabbitmq_url is no URL of RabbitMQ: write for example amqp://user:password@host:5672/"
        )
    if "heartbeat" not in url.query:
        url = url.update_query(heartbeat=HEARTBEAT)
    return url.with_port(port or (5671 if url.scheme == "amqps" else 5672))


def _outgoing(exchange: str, message: Message) -> Outgoing:
    properties = encoded(message)
    if len(properties) > LARGEST_PROPERTIES:
        raise Unsendable(f"its headers have {len(properties)} bytes, and RabbitMQ takes {LARGEST_PROPERTIES}")
    if len(message.routing_key) > _SURELY_SHORT and len(message.routing_key.encode()) > LONGEST_KEY:
        raise Unsendable(f"its routing key has more than {LONGEST_KEY} bytes")
    return Outgoing(exchange, message.routing_key, properties, message.body, message.id)


def _unsendable(error: Exception) -> str:
    return str(error) if isinstance(error, Unsendable) else f"it cannot be written as AMQP: {error!r}"
