"""Frames: AMQP written and read by hand, a batch of messages in one piece. The connection itself is aiormq's.

A reader of our own stands between the socket and aiormq. Frames of channels that were opened here end here; everything
else, the handshake and the heartbeats included, goes on to aiormq as it came.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel
from aiormq.connection import TransportFactory
from pamqp import base, commands, frame
from yarl import URL

from outbox.transports.rabbitmq.channel import Ended, Incoming, Lost, cancelled
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Confirms, Outgoing
from outbox.transports.rabbitmq.envelope import Envelope

ANSWER_WITHIN = 10.0  # seconds in which the broker answers to what is asked of it
USUAL_FRAME = 131_072  # bytes, where the broker sets no limit
LARGEST_FRAME = 64 * 1024 * 1024  # bytes: what claims to be larger is no frame
HEARTBEAT_EVERY = 5.0  # seconds: aiormq sees no traffic of ours and would take the connection for dead

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, 0xCE
_FRAME_END = b"\xce"
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_PROTOCOL_HEADER = b"A"[0]  # how a server that speaks another version begins
_FRAME = Struct(">BHI")
_HEADER_FRAME = Struct(">BHIHHQ")
_BODY_FRAME = Struct(">BBHI")  # with the end of the frame before it
_INDEX, _SIZE, _TAG_AND_BITS = Struct(">I"), Struct(">Q"), Struct(">QB")
_SETTLING = Struct(">BHIIQBB")
_BASIC_CLASS = 60

_DELIVER, _RETURN = commands.Basic.Deliver.index, commands.Basic.Return.index
_ACKED, _NACKED = commands.Basic.Ack.index, commands.Basic.Nack.index
_CANCEL = commands.Basic.Cancel.index
_CLOSE, _CLOSE_OK = commands.Channel.Close.index, commands.Channel.CloseOk.index
_GOODBYE = commands.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0)


class Tap(asyncio.StreamReader):
    """What the socket brings, sorted by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[int, FrameChannel] = {}
        self.on_connection: Callable[[base.Frame], object] = lambda method: None
        self.on_end: Callable[[str], object] = lambda reason: None
        self._rest = b""
        self._heartbeat_at = time.monotonic()

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        if self._rest:
            data = self._rest + data
        try:
            self._rest = data[self._sort(data) :]
        except Exception as error:  # noqa: BLE001 - what cannot be read ends the connection, whatever it is
            self._rest = b""
            self.set_exception(ConnectionError(f"a frame cannot be read: {error}"))

    def feed_eof(self) -> None:
        super().feed_eof()
        self.on_end("the broker closed the connection")

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.on_end(f"the connection broke: {exc}")

    def _sort(self, data: bytes) -> int:
        """Hand on the frames that are whole; where the rest begins."""
        start, end = 0, len(data)
        ours = False
        while end - start >= _FRAME.size:
            kind, number, size = _FRAME.unpack_from(data, start)
            if kind == _PROTOCOL_HEADER:
                super().feed_data(data[start:])
                return end
            if size > LARGEST_FRAME:
                raise ValueError(f"{size} bytes are announced")
            stop = start + _FRAME.size + size + 1
            if stop > end:
                break
            if data[stop - 1] != _END:
                raise ValueError("its end is not where it should be")
            channel = self.channels.get(number)
            if channel is not None:
                ours = True
                channel.take(kind, data, start + _FRAME.size, stop - 1)
            else:
                whole = data[start:stop]
                if number == 0 and kind == _METHOD:
                    self.on_connection(frame.unmarshal(whole)[2])  # type: ignore[arg-type]
                super().feed_data(whole)
            start = stop
        if ours:
            self._sign_of_life()
        return start

    def _sign_of_life(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at > HEARTBEAT_EVERY:
            self._heartbeat_at = now
            super().feed_data(_HEARTBEAT)


class _Factory(TransportFactory):
    """Opens the socket for aiormq, with the tap in it."""

    def __init__(self) -> None:
        self.tap = Tap()
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider = options.pop("ssl_context_provider")
        context: ssl.SSLContext | None = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self.tap, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, host=url.host or "", port=url.port or 0, ssl=context, **options
            )
        except OSError as error:
            raise aiormq.exceptions.AMQPConnectionError(*error.args) from error
        self.writer = asyncio.StreamWriter(transport, protocol, self.tap, loop)
        return self.tap, self.writer


class FrameConnection:
    """A connection of aiormq's with channels of our own beside its."""

    def __init__(self, connection: aiormq.Connection, tap: Tap, writer: asyncio.StreamWriter) -> None:
        self._connection = connection
        self._tap = tap
        self._writer = writer
        self._blocked: str | None = None
        self._begun: FrameChannel | None = None  # a publish that is never finished
        self.on_blocked: Callable[[str], object] = lambda reason: None
        self.on_unblocked: Callable[[], object] = lambda: None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        tap.on_connection = self._on_connection
        tap.on_end = lambda reason: self._end(Ended(reason))
        connection.closing.add_done_callback(lambda closing: self._end(Ended(_reason(closing))))
        tune = connection.connection_tune
        self.frame_max = tune.frame_max or USUAL_FRAME
        self._numbers = tune.channel_max or 65_535

    @classmethod
    async def connect(cls, url: URL, name: str) -> FrameConnection:
        factory = _Factory()
        connection = aiormq.Connection(url, transport_factory=factory, client_properties={"connection_name": name})
        said: list[base.Frame] = []
        factory.tap.on_connection = said.append
        try:
            await connection.connect()
        except aiormq.exceptions.AMQPError:
            for method in said:
                if isinstance(method, commands.Connection.Close):  # aiormq says no more than that it came
                    raise Lost(Ended(method.reply_text or "refused", method.reply_code)) from None
            raise
        if factory.writer is None:
            raise RuntimeError("aiormq opened a connection without asking for a socket")
        return cls(connection, factory.tap, factory.writer)

    @property
    def server_version(self) -> tuple[int, ...] | None:
        return version_of(self._connection.server_properties)

    async def blocked(self) -> str | None:
        return self._blocked

    async def asked_to_publish(self) -> str | None:
        """Why the broker takes no publishes, found out. It tells only those who publish, and stops to listen to them.

        So a publish is begun that is never finished: no message comes of it, and no right is needed for it.
        """
        if self._blocked is not None:
            return self._blocked
        if self._begun is None:
            self._begun = await self.channel()
            self._begun.begin_publish()
        else:
            self._begun.go_on_publishing()
        refused = asyncio.Event()
        self.on_blocked = lambda reason: refused.set()
        answers = [asyncio.create_task(self._listens()), asyncio.create_task(_set(refused))]
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for answer in answers:
                answer.cancel()
            ends = await asyncio.gather(*answers, return_exceptions=True)
        if isinstance(ends[0], Lost):
            raise ends[0]
        return self._blocked

    async def _listens(self) -> None:
        channel = await self.channel()
        await channel.close()

    async def channel(self) -> FrameChannel:
        if self.ended.done():
            raise Lost(self.ended.result())
        # aiormq's channels are counted from 1 upwards, so ours are counted downwards.
        number = next(n for n in range(self._numbers, 0, -1) if n not in self._tap.channels)
        channel = FrameChannel(self, number)
        self._tap.channels[number] = channel
        try:
            await channel.open()
        except TimeoutError:
            self._end(Ended("the broker opens no channel"))  # heartbeats would notice it too, much later
            raise
        return channel

    async def client_channel(self) -> AbstractChannel:
        number = lowest_free({*self._connection.channels, *self._tap.channels})
        return await self._connection.channel(number, publisher_confirms=False, timeout=ANSWER_WITHIN)

    def write(self, data: bytes) -> None:
        if not self.ended.done():
            self._writer.write(data)

    def forget(self, number: int) -> None:
        self._tap.channels.pop(number, None)

    async def close(self) -> None:
        self._end(Ended("closed"))
        await self._connection.close()

    def _on_connection(self, method: base.Frame) -> None:
        match method:
            case commands.Connection.Blocked():
                self._blocked = method.reason or "no reason given"
                self.on_blocked(self._blocked)
            case commands.Connection.Unblocked():
                self._blocked = None
                self.on_unblocked()
            case commands.Connection.Close():
                self._end(Ended(method.reply_text or "closed by the broker", method.reply_code))

    def _end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)
            for channel in list(self._tap.channels.values()):
                channel.end(ended)


class FrameChannel:
    """One channel whose frames are written and read here."""

    def __init__(self, connection: FrameConnection, number: int) -> None:
        self._connection = connection
        self.server_version = connection.server_version
        self._number = number
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._confirms = Confirms()
        self._taken: Callable[[Incoming], object] = lambda incoming: None
        self._consumers: list[str] = []
        self._tags = consumer_tags()
        self._prefetch = 0
        self._asking = asyncio.Lock()
        self._reply: asyncio.Future[base.Frame] | None = None
        self._routes: dict[tuple[str, str], bytes] = {}
        self._opening: Incoming | tuple[str, str] | None = None  # whose content follows: a delivery's or a return's
        self._properties = b""
        self._missing = 0
        self._parts: list[bytes] = []

    async def open(self) -> None:
        await self._ask(commands.Channel.Open())
        await self._ask(commands.Confirm.Select())

    async def publish(self, batch: Sequence[Outgoing], within: float) -> list[BrokerAnswer]:
        if self.ended.done():
            raise Lost(self.ended.result())
        data = self._written(batch)
        window = self._confirms.expect(batch)
        self._connection.write(data)
        await asyncio.wait([window.done], timeout=within)
        if not window.done.done():
            self.retire(f"no answer to a publish within {within:g} s")  # later answers would be taken for others'
        return window.answers

    def begin_publish(self) -> None:
        """Announce a message of one byte."""
        properties = b"\0\0"
        header = _HEADER_FRAME.pack(_HEADER, self._number, 12 + len(properties), _BASIC_CLASS, 0, 1)
        self._connection.write(self._route("", "") + header + properties + _FRAME_END)

    def go_on_publishing(self) -> None:
        """Send nothing of that byte."""
        self._connection.write(_FRAME.pack(_BODY, self._number, 0) + _FRAME_END)

    async def consume(self, queue: str, prefetch: int, taken: Callable[[Incoming], object]) -> None:
        self._taken, self._prefetch = taken, prefetch
        await self.heard()
        self._consumers.append(next(self._tags))
        await self._ask(commands.Basic.Consume(queue=queue, consumer_tag=self._consumers[-1]))

    async def cancel(self) -> None:
        while self._consumers:
            await self._ask(commands.Basic.Cancel(consumer_tag=self._consumers.pop()))

    def settle(self, acks: Sequence[tuple[int, bool]], nacks: Sequence[tuple[int, bool]] = ()) -> None:
        if self.ended.done():
            return
        number = self._number
        self._connection.write(
            b"".join(
                [
                    *(_SETTLING.pack(_METHOD, number, 13, _ACKED, tag, multiple, _END) for tag, multiple in acks),
                    *(_SETTLING.pack(_METHOD, number, 13, _NACKED, tag, requeue << 1, _END) for tag, requeue in nacks),
                ]
            )
        )

    async def heard(self) -> None:
        await self._ask(commands.Basic.Qos(prefetch_count=self._prefetch))

    async def close(self) -> None:
        if not self.ended.done():
            with suppress(Lost, TimeoutError):
                await self._ask(_GOODBYE)
                self._connection.forget(self._number)
            self.end(Ended("closed"))

    def retire(self, reason: str) -> None:
        if not self.ended.done():
            self.end(Ended(reason))
            self._connection.write(frame.marshal(_GOODBYE, self._number))  # the answer sets the number free

    def end(self, ended: Ended) -> None:
        """Nothing comes or goes any more."""
        if not self.ended.done():
            self.ended.set_result(ended)
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(Lost(ended))
            self._confirms.end()

    async def _ask(self, method: base.Frame) -> base.Frame:
        """Send a method and wait for its answer."""
        async with self._asking:
            if self.ended.done():
                raise Lost(self.ended.result())
            self._reply = asyncio.get_running_loop().create_future()
            self._connection.write(frame.marshal(method, self._number))
            try:
                async with asyncio.timeout(ANSWER_WITHIN):
                    return await self._reply
            except BaseException:
                if not self._reply.done() or self._reply.cancelled():
                    self.retire(f"no answer to {method.name}")  # the next answer would be taken for another's
                raise
            finally:
                self._reply = None

    # Writing.

    def _written(self, batch: Sequence[Outgoing]) -> bytes:
        """The frames of all messages in one piece."""
        number, largest = self._number, self._connection.frame_max - _FRAME.size - 1
        parts: list[bytes] = []
        for outgoing in batch:
            route = self._routes.get((outgoing.exchange, outgoing.routing_key))
            if route is None:
                route = self._route(outgoing.exchange, outgoing.routing_key)
            properties, body = outgoing.properties, outgoing.body
            size = len(body)
            parts += (
                route,
                _HEADER_FRAME.pack(_HEADER, number, 12 + len(properties), _BASIC_CLASS, 0, size),
                properties,
            )
            if size <= largest:
                if size:
                    parts += (_BODY_FRAME.pack(_END, _BODY, number, size), body)
            else:
                for start in range(0, size, largest):
                    part = body[start : start + largest]
                    parts += (_BODY_FRAME.pack(_END, _BODY, number, len(part)), part)
            parts.append(_FRAME_END)
        return b"".join(parts)

    def _route(self, exchange: str, routing_key: str) -> bytes:
        if len(self._routes) > 10_000:  # routing keys may hold ids
            self._routes.clear()
        method = commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
        route = self._routes[exchange, routing_key] = frame.marshal(method, self._number)
        return route

    # Reading.

    def take(self, kind: int, data: bytes, start: int, end: int) -> None:
        """One frame of this channel."""
        if kind == _METHOD:
            self._take_method(_INDEX.unpack_from(data, start)[0], data, start + 4, end)
        elif kind == _HEADER:
            self._missing = _SIZE.unpack_from(data, start + 4)[0]
            self._properties = data[start + 12 : end]
            if not self._missing:
                self._content(b"")
        elif kind == _BODY:
            part = data[start:end]
            self._missing -= len(part)
            if self._missing or self._parts:
                self._parts.append(part)
                if self._missing:
                    return
                part, self._parts = b"".join(self._parts), []
            self._content(part)

    def _take_method(self, index: int, data: bytes, start: int, end: int) -> None:
        if index == _DELIVER:
            self._opening = announced(data, start)
        elif index in (_ACKED, _NACKED):
            tag, bits = _TAG_AND_BITS.unpack_from(data, start)
            answer = BrokerAnswer.CONFIRMED if index == _ACKED else BrokerAnswer.REJECTED
            self._confirms.answered(tag, bool(bits & 1), answer)
        elif index == _RETURN:
            _, at = short_text(data, start + 2)
            exchange, at = short_text(data, at)
            self._opening = (exchange, short_text(data, at)[0])
        elif index == _CLOSE:
            close = commands.Channel.Close()
            close.unmarshal(data[start:end])
            self._connection.write(frame.marshal(commands.Channel.CloseOk(), self._number))
            self._connection.forget(self._number)
            self.end(Ended(close.reply_text or "closed by the broker", close.reply_code))
        elif index == _CANCEL:
            self.retire(cancelled(self.server_version))
        elif index == _CLOSE_OK and self.ended.done():
            self._connection.forget(self._number)
        elif self._reply is not None and not self._reply.done():
            method = commands.INDEX_MAPPING[index]()
            method.unmarshal(data[start:end])
            self._reply.set_result(method)

    def _content(self, body: bytes) -> None:
        opening, self._opening = self._opening, None
        if self.ended.done() or opening is None:
            return
        if isinstance(opening, Incoming):
            opening.properties, opening.body = self._properties, body
            self._taken(opening)
        else:
            exchange, routing_key = opening
            self._confirms.returned(exchange, routing_key, Envelope.read(self._properties).text("message_id"))


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def lowest_free(numbers: Collection[int]) -> int:
    """A number for a channel of aiormq's, which by itself would count on and on, beyond what the broker allows."""
    return next(number for number in itertools.count(1) if number not in numbers)


def consumer_tags() -> Iterator[str]:
    """One for each consumer of a channel: RabbitMQ 3.10 breaks down over one that comes again."""
    return (f"outbox-{number}" for number in itertools.count(1))


def version_of(server_properties: Any) -> tuple[int, ...] | None:
    """The server's version as numbers, if it says one."""
    try:
        return tuple(int(part) for part in str(server_properties["version"]).split("+")[0].split("-")[0].split("."))
    except (KeyError, TypeError, ValueError):
        return None


def announced(data: bytes, start: int) -> Incoming:
    """What a Basic.Deliver says of the delivery whose content follows."""
    consumer_tag, at = short_text(data, start)
    tag, bits = _TAG_AND_BITS.unpack_from(data, at)
    exchange, at = short_text(data, at + 9)
    return Incoming(tag, bits & 1 == 1, exchange, short_text(data, at)[0], consumer_tag)


def short_text(data: bytes, start: int) -> tuple[str, int]:
    end = start + 1 + data[start]
    return data[start + 1 : end].decode(errors="replace"), end


def _reason(closing: asyncio.Future[Any]) -> str:
    if closing.cancelled():
        return "closed"
    error = closing.exception()
    return "closed" if error is None else str(error) or type(error).__name__
