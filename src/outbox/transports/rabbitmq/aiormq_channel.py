"""Plain: channels by the client library's public interface, for connections that were given to us."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from pamqp import commands

from outbox.core.loops import cancelled_from_outside
from outbox.transports.rabbitmq.channel import Ended, Incoming, Lost, cancelled
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.frames import ANSWER_WITHIN, USUAL_FRAME, consumer_tags, lowest_free, version_of
from outbox.transports.rabbitmq.guarding import FrameGuard, Unparsed

T = TypeVar("T")

ENDED_WITHIN = 2.0  # seconds: the library lets go of what waits for an answer before it says why


class AiormqConnection:
    """A connection of aiormq's."""

    def __init__(self, connection: AbstractConnection, *, ours: bool = False) -> None:
        self._connection = connection
        self._ours = ours  # whether it may be closed here
        self.on_blocked: Callable[[str], object] = lambda reason: None  # the library only logs it
        self.on_unblocked: Callable[[], object] = lambda: None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        connection.closing.add_done_callback(self._end)
        self._guard = FrameGuard.of(connection)

    @property
    def server_version(self) -> tuple[int, ...] | None:
        return version_of(getattr(self._connection, "server_properties", None))

    @property
    def frame_max(self) -> int:
        return self._connection.connection_tune.frame_max or USUAL_FRAME

    async def blocked(self) -> str | None:
        ready = asyncio.ensure_future(self._connection.ready())
        try:
            for _ in range(3):  # it needs no more turns of the loop, unless it waits
                await asyncio.sleep(0)
            return None if ready.done() else "the broker takes no publishes"
        finally:
            ready.cancel()

    async def channel(self) -> AiormqChannel:
        channel = await self._open(publisher_confirms=True, on_return_raises=True)
        return AiormqChannel(channel, self.server_version)

    async def client_channel(self) -> AbstractChannel:
        return await self._open(publisher_confirms=False)

    async def close(self) -> None:
        if self._ours:
            await self._connection.close()
        if not self.ended.done():
            self.ended.set_result(Ended("closed"))

    async def _open(self, **options: bool) -> AbstractChannel:
        """A new channel. The library waits for its answer even on a connection that has ended."""
        opening = asyncio.ensure_future(asked(self._numbered(**options)))
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may fail when left alone
        either: list[asyncio.Future[Any]] = [opening, self.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise Lost(self.ended.result())
        finally:
            opening.cancel()
        return opening.result()

    async def _numbered(self, **options: bool) -> AbstractChannel:
        number = lowest_free(self._connection.channels)
        channel = await self._connection.channel(number, timeout=ANSWER_WITHIN, **options)
        guarded = self._guard.channels if self._guard is not None else set()
        guarded.add(number)
        channel.closing.add_done_callback(lambda _: guarded.discard(number))
        return channel

    def _end(self, closing: asyncio.Future[Any]) -> None:
        if not self.ended.done():
            self.ended.set_result(_ended_by(closing))


class AiormqChannel:
    """A channel of aiormq's."""

    def __init__(self, channel: AbstractChannel, server_version: tuple[int, ...] | None) -> None:
        self._channel = channel
        self.server_version = server_version
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        channel.closing.add_done_callback(lambda closing: self._end(_ended_by(closing)))
        self._settling: asyncio.Queue[Awaitable[None] | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._consumers: list[str] = []
        self._tags = consumer_tags()
        self._prefetch = 0
        self._in_flight: dict[str, asyncio.Future[BrokerAnswer]] = {}

    async def publish(self, batch: Sequence[Outgoing], within: float) -> list[BrokerAnswer]:
        if self.ended.done():
            raise Lost(self.ended.result())
        tasks = [asyncio.ensure_future(self._publish(outgoing)) for outgoing in batch]
        try:
            await asyncio.wait(tasks, timeout=within)
        finally:
            open_ones = [task for task in tasks if not task.done()]
            for task in open_ones:
                task.cancel()
        answers = [BrokerAnswer.UNKNOWN if task in open_ones or task.cancelled() else task.result() for task in tasks]
        if BrokerAnswer.UNKNOWN in answers:
            if not open_ones:
                await asyncio.wait([self.ended], timeout=ENDED_WITHIN)
            self.retire(f"no answer to a publish within {within:g} s")
        return answers

    async def consume(self, queue: str, prefetch: int, taken: Callable[[Incoming], object]) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            if not self.ended.done():
                taken(_incoming(message))

        async def on_cancel(frame: commands.Basic.Cancel) -> None:
            self.retire(cancelled(self.server_version))

        if self._writer is None:
            self._channel.on_consumer_cancel_callbacks.add(on_cancel)
            self._writer = asyncio.create_task(self._write(), name="outbox acknowledgements")
        tag = next(self._tags)
        self._consumers.append(tag)
        self._prefetch = prefetch
        await self.heard()
        await asked(self._channel.basic_consume(queue, on_message, consumer_tag=tag, timeout=ANSWER_WITHIN))

    async def cancel(self) -> None:
        while self._consumers:
            await asked(self._channel.basic_cancel(self._consumers.pop(), timeout=ANSWER_WITHIN))

    def settle(self, acks: Sequence[tuple[int, bool]], nacks: Sequence[tuple[int, bool]] = ()) -> None:
        if self.ended.done():
            return
        for tag, multiple in acks:
            self._settling.put_nowait(self._channel.basic_ack(tag, multiple, wait=False))
        for tag, requeue in nacks:
            self._settling.put_nowait(self._channel.basic_nack(tag, requeue=requeue, wait=False))

    async def heard(self) -> None:
        async with asyncio.timeout(ANSWER_WITHIN):
            await self._settling.join()
        await asked(self._channel.basic_qos(prefetch_count=self._prefetch, timeout=ANSWER_WITHIN))

    def retire(self, reason: str) -> None:
        if not self.ended.done():
            self._end(Ended(reason))
            closing = asyncio.ensure_future(self._channel.close())
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        if self._writer is not None and not self.ended.done():
            self._settling.put_nowait(None)
            await asyncio.wait([self._writer], timeout=ANSWER_WITHIN)
        with suppress(RuntimeError, TimeoutError, aiormq.exceptions.AMQPError):
            async with asyncio.timeout(ANSWER_WITHIN):
                await self._channel.close()
        self._end(Ended("closed"))

    async def _publish(self, outgoing: Outgoing) -> BrokerAnswer:
        """The library tells returns apart by message id, so of two with the same id one waits for the other."""
        while (before := self._in_flight.get(outgoing.id)) is not None:
            await asyncio.wait([before])
        answered = self._in_flight[outgoing.id] = asyncio.get_running_loop().create_future()
        try:
            return await self._answer(outgoing)
        finally:
            del self._in_flight[outgoing.id]
            answered.cancel()

    async def _answer(self, outgoing: Outgoing) -> BrokerAnswer:
        try:
            answer = await self._channel.basic_publish(
                outgoing.body,
                exchange=outgoing.exchange,
                routing_key=outgoing.routing_key,
                properties=_Written(outgoing),
                mandatory=True,
            )
        except aiormq.exceptions.PublishError:
            return BrokerAnswer.RETURNED
        except aiormq.exceptions.DeliveryError:
            return BrokerAnswer.REJECTED
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return BrokerAnswer.UNKNOWN  # the library's own end, not ours
        except Exception:  # noqa: BLE001 - whatever it was, it was no acknowledgement
            return BrokerAnswer.UNKNOWN
        return BrokerAnswer.CONFIRMED if type(answer) is commands.Basic.Ack else BrokerAnswer.UNKNOWN

    async def _write(self) -> None:
        """Settle in the order in which it was asked for."""
        while (settling := await self._settling.get()) is not None:
            try:
                await settling
            except Exception as error:  # noqa: BLE001 - what is not settled comes back
                self.retire(f"it could not be settled: {error}")
            finally:
                self._settling.task_done()
        self._settling.task_done()  # the end, too: `heard` waits until all is done

    def _end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)
            if self._writer is not None:
                self._settling.put_nowait(None)


async def asked(answering: Awaitable[T]) -> T:
    """The library's answer. It may swallow a cancellation that comes at the same moment, or throw one of its own."""
    try:
        answer = await answering
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise Lost(Ended("the connection fell silent")) from None
    except (RuntimeError, aiormq.exceptions.AMQPError) as error:
        raise Lost(_ended(error)) from error
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer


class _Written(commands.Basic.Properties):
    """Properties as they are: the client library would write some of them otherwise, and some not at all."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__(message_id=outgoing.id)
        self._data = outgoing.properties

    def marshal(self) -> bytes:
        return self._data


def _incoming(message: DeliveredMessage) -> Incoming:
    header = message.header
    try:
        properties = header.raw if isinstance(header, Unparsed) else header.properties.marshal()
    except Exception:  # noqa: BLE001 - what it cannot write again
        properties = b""  # they cannot be read, which makes it a dead letter
    return Incoming(
        message.delivery_tag or 0,
        bool(message.redelivered),
        message.exchange or "",
        message.routing_key or "",
        message.consumer_tag or "",
        properties,
        message.body,
    )


def _ended_by(closing: asyncio.Future[Any]) -> Ended:
    if closing.cancelled():
        return Ended("closed")
    error = closing.exception()
    return Ended("closed") if error is None else _ended(error)


def _ended(error: BaseException) -> Ended:
    text = str(error.args[-1] if error.args else error) or type(error).__name__
    return Ended(text, next((code for kind, code in _CODES.items() if isinstance(error, kind)), None))


_CODES: dict[type[BaseException], int] = {
    aiormq.exceptions.ChannelAccessRefused: 403,
    aiormq.exceptions.ChannelNotFoundEntity: 404,
    aiormq.exceptions.ChannelLockedResource: 405,
    aiormq.exceptions.ChannelPreconditionFailed: 406,
    aiormq.exceptions.ConnectionFrameError: 501,
    aiormq.exceptions.ConnectionSyntaxError: 502,
    aiormq.exceptions.ConnectionChannelError: 504,
    aiormq.exceptions.ConnectionUnexpectedFrame: 505,
}
