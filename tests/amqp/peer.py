"""Peer: the broker's side of AMQP 0-9-1, played by a test.

It shakes hands and says yes to whatever must be answered at once. What a client publishes, consumes and settles waits
for the test, which decides what becomes of it:

    async with Peer() as peer:
        publishing = asyncio.create_task(transport.publish([message]))
        published = await peer.published()
        published.channel.ack(published.tag)
        await publishing

`peer.replies[commands.Queue.Declare] = …` changes one of its answers; None is silence.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pamqp import base, body, commands, frame, header
from pamqp.commands import Basic, Channel, Connection, Queue
from pamqp.common import FieldTable

LONG = 60.0  # seconds after which something that a test waits for is lost

T = TypeVar("T")
Reply = Callable[[Any], base.Frame | None]

_CAPABILITIES: FieldTable = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
}


@dataclass(frozen=True)
class Published:
    """What a client published: `tag` is the number by which the broker answers for it."""

    channel: PeerChannel
    tag: int
    method: Basic.Publish
    properties: Basic.Properties
    body: bytes


@dataclass(frozen=True)
class Consuming:
    """A consumer that a client started."""

    channel: PeerChannel
    consumer_tag: str
    queue: str

    def deliver(self, text: bytes = b"{}", **properties: Any) -> int:
        """Deliver a message with these properties; `redelivered`, `exchange` and `routing_key` go into the delivery."""
        tag = next(self.channel.delivery_tags)
        redelivered = properties.pop("redelivered", False)
        exchange, routing_key = properties.pop("exchange", "outbox"), properties.pop("routing_key", "order.created")
        self.channel.content(
            Basic.Deliver(self.consumer_tag, tag, redelivered, exchange, routing_key),
            Basic.Properties(**{"message_id": f"message-{tag}", "content_type": "application/json", **properties}),
            text,
        )
        return tag

    def cancel(self) -> None:
        """Tell that it ends, as the broker does when the queue is deleted."""
        self.channel.send(Basic.Cancel(self.consumer_tag, nowait=True))


@dataclass(frozen=True)
class Settled:
    """An ack, nack or reject of a client."""

    channel: PeerChannel
    method: Basic.Ack | Basic.Nack | Basic.Reject

    @property
    def tag(self) -> int:
        return self.method.delivery_tag or 0


class Peer:
    """A broker on a loopback port; the client's URL is `url`."""

    def __init__(self, *, version: str = "3.10.8", frame_max: int = 131_072) -> None:
        self.version = version
        self.tune = Connection.Tune(channel_max=2047, frame_max=frame_max, heartbeat=60)
        self.replies: dict[type[base.Frame], Reply] = {}
        self.connections: list[PeerConnection] = []
        self.accepts = True  # else it closes every new connection at once
        self.history: list[tuple[PeerChannel, base.Frame]] = []  # every method that a client sent but Basic.Publish
        self._serving: list[asyncio.Task[Any] | None] = []
        self._published: asyncio.Queue[Published] = asyncio.Queue()
        self._consuming: asyncio.Queue[Consuming] = asyncio.Queue()
        self._settled: asyncio.Queue[Settled] = asyncio.Queue()
        self._asked: asyncio.Queue[tuple[PeerChannel, base.Frame]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self.connections:
            connection.reset()
        await asyncio.gather(*filter(None, self._serving))

    async def published(self) -> Published:
        """What a client publishes next, or published and nobody asked for yet."""
        return await _next(self._published)

    async def several_published(self, count: int) -> list[Published]:
        return [await self.published() for _ in range(count)]

    async def consuming(self) -> Consuming:
        """The next consumer that a client starts."""
        return await _next(self._consuming)

    async def settled(self) -> Settled:
        """The next delivery, or range of them, that a client settles."""
        return await _next(self._settled)

    async def asked(self, kind: type[base.Frame]) -> tuple[PeerChannel, Any]:
        """The next method of this kind, such as Connection.Close; those of other kinds before it are passed over."""
        async with asyncio.timeout(LONG):
            while True:
                channel, method = await self._asked.get()
                if isinstance(method, kind):
                    return channel, method

    @property
    def has_published(self) -> bool:
        """Whether something was published that nobody asked for yet."""
        return not self._published.empty()

    @property
    def has_settled(self) -> bool:
        return not self._settled.empty()

    def reply(self, method: base.Frame) -> base.Frame | None:
        chosen = self.replies.get(type(method))
        return chosen(method) if chosen else _yes(method)

    def note(self, channel: PeerChannel, method: base.Frame) -> None:
        self._asked.put_nowait((channel, method))
        self.history.append((channel, method))
        match method:
            case Basic.Consume():
                self._consuming.put_nowait(Consuming(channel, method.consumer_tag or _TAG, method.queue))
            case Basic.Ack() | Basic.Nack() | Basic.Reject():
                self._settled.put_nowait(Settled(channel, method))

    def note_published(self, published: Published) -> None:
        self._published.put_nowait(published)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = PeerConnection(self, reader, writer)
        self.connections.append(connection)
        self._serving.append(asyncio.current_task())
        if not self.accepts:
            connection.reset()
        await connection.serve()


class PeerConnection:
    """One connection of a client."""

    def __init__(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peer = peer
        self.channels: dict[int, PeerChannel] = {}
        self._reader = reader
        self._writer = writer
        self._aside: deque[tuple[int, Any]] = deque()  # frames that came between those of another channel
        self._heard = asyncio.Event()
        self._heard.set()

    def block(self, reason: str = "low on memory") -> None:
        self.send(Connection.Blocked(reason))

    def unblock(self) -> None:
        self.send(Connection.Unblocked())

    def close(self, code: int, text: str) -> None:
        """Close it in good order, as an operator or a broker that stops does."""
        self.send(Connection.Close(code, text, 0, 0))

    def reset(self) -> None:
        """Cut it: the client reads "connection reset by peer", with whatever was on its way."""
        self._heard.set()
        if not self._writer.is_closing():
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._writer.transport.abort()

    def hush(self) -> None:
        """Hear nothing more and say nothing more, as behind a firewall that forgot the connection."""
        self._heard.clear()

    def write(self, data: bytes) -> None:
        """Write bytes as they are, such as half a frame."""
        if not self._writer.is_closing():
            self._writer.write(data)

    def send(self, method: base.Frame, channel: int = 0) -> None:
        self.write(frame.marshal(method, channel))

    async def serve(self) -> None:
        try:
            await self._shake_hands()
            heard: object = None
            while not isinstance(heard, Connection.Close | Connection.CloseOk):
                number, heard = self._aside.popleft() if self._aside else await self._next()
                await self._take(number, heard)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self._writer.close()

    async def _shake_hands(self) -> None:
        await self._reader.readexactly(8)
        properties: FieldTable = {"product": "RabbitMQ", "version": self.peer.version, "capabilities": _CAPABILITIES}
        self.send(Connection.Start(server_properties=properties, mechanisms="PLAIN AMQPLAIN", locales="en_US"))
        await self._next()  # StartOk
        self.send(self.peer.tune)
        await self._next()  # TuneOk

    async def _next(self) -> tuple[int, Any]:
        start = await self._reader.readexactly(7)
        size = struct.unpack(">I", start[3:])[0]
        rest = await self._reader.readexactly(size + 1)
        await self._heard.wait()
        _, number, heard = frame.unmarshal(start + rest)
        return number, heard

    async def _take(self, number: int, heard: Any) -> None:
        channel = self.channels.setdefault(number, PeerChannel(self, number))
        if isinstance(heard, Basic.Publish):
            await channel.take_content(heard)
        elif isinstance(heard, base.Frame):
            if isinstance(heard, Channel.Open):
                channel = self.channels[number] = PeerChannel(self, number)
            reply = self.peer.reply(heard)
            if reply is not None:
                self.send(reply, number)
                channel.closed |= isinstance(reply, Channel.Close | Channel.CloseOk)
            self.peer.note(channel, heard)

    async def _next_of(self, number: int) -> Any:
        """The next frame of one channel; those of others may come between them, and wait."""
        for index, (channel, heard) in enumerate(self._aside):
            if channel == number:
                del self._aside[index]
                return heard
        while True:
            channel, heard = await self._next()
            if channel == number:
                return heard
            self._aside.append((channel, heard))

    async def content(self, number: int) -> tuple[Basic.Properties, bytes]:
        head = await self._next_of(number)
        parts, size = [], 0
        while size < head.body_size:
            part = await self._next_of(number)
            parts.append(part.value)
            size += len(part.value)
        return head.properties, b"".join(parts)


class PeerChannel:
    """One channel of a client's connection, and what a broker may say on it."""

    def __init__(self, connection: PeerConnection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.closed = False  # then it hears and says nothing more
        self.delivery_tags = itertools.count(1)
        self._publish_tags = itertools.count(1)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.send(Basic.Ack(tag, multiple))

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self.send(Basic.Nack(tag, multiple, requeue=False))

    def give_back(self, published: Published, code: int = 312, text: str = "NO_ROUTE") -> None:
        """Return a message that no queue is bound to; the broker acknowledges it afterwards."""
        method = published.method
        returned = Basic.Return(code, text, method.exchange or "", method.routing_key or "")
        self.content(returned, published.properties, published.body)

    def close(self, code: int, text: str) -> None:
        self.send(Channel.Close(code, text, 60, 40))
        self.closed = True

    def send(self, method: base.Frame) -> None:
        self.write(frame.marshal(method, self.number))

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.connection.write(data)

    def content(self, method: base.Frame, properties: Basic.Properties, text: bytes) -> None:
        frames: list[Any] = [method, header.ContentHeader(0, len(text), properties)]
        largest = (self.connection.peer.tune.frame_max or 131_072) - 8
        frames += [body.ContentBody(text[start : start + largest]) for start in range(0, len(text), largest)]
        self.write(b"".join(frame.marshal(one, self.number) for one in frames))

    async def take_content(self, method: Basic.Publish) -> None:
        properties, text = await self.connection.content(self.number)
        if not self.closed:
            published = Published(self, next(self._publish_tags), method, properties, text)
            self.connection.peer.note_published(published)


async def _next(queue: asyncio.Queue[T]) -> T:
    async with asyncio.timeout(LONG):
        return await queue.get()


_TAG = "a-consumer"


def _yes(method: base.Frame) -> base.Frame | None:
    """What a broker answers if it has nothing against it."""
    match method:
        case Basic.Consume():
            return Basic.ConsumeOk(method.consumer_tag or _TAG)
        case Basic.Cancel():
            return Basic.CancelOk(method.consumer_tag)
        case Basic.Get():
            return Basic.GetEmpty()
        case Queue.Declare():
            return Queue.DeclareOk(method.queue or "a-queue", 0, 0)
        case _ if method.valid_responses:
            return _METHODS[method.valid_responses[0]]()
        case _:
            return None


_KINDS: Collection[Any] = commands.INDEX_MAPPING.values()
_METHODS: Mapping[str, Callable[[], base.Frame]] = {kind.name: kind for kind in _KINDS}
