"""Broker: a RabbitMQ that may be crashed, with a proxy before it, and what the rig asks of it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Self

import aiormq
from aiormq.abc import AbstractChannel, DeliveredMessage

from outbox.core.message import Message
from outbox.testing.servers import RabbitMQ
from outbox.testing.servers.programs import ServerFailed
from outbox.transports.rabbitmq.envelope import Envelope
from tests.chaos.evidence import Buried
from tests.chaos.history import Emitted
from tests.support.proxy import Link, Proxy

EXCHANGE = "outbox"
DEAD_LETTERS = ".dlq"
LONELY_QUEUE, LONELY_BINDING = "poison", "poison.*"  # the only binding without which its messages go nowhere else
WITNESS = "witness"  # the rig's own queue, where there is one: it gets a copy of everything
SPARE_QUEUE = "spare"  # the only queue that can be deleted without a loss
TICK = 500.0  # milliseconds after which a queue tells how many messages it holds
LOOK_EVERY = 2.0  # seconds: rabbitmqctl is a program of its own, which takes its time
USUAL_MEMORY, NO_MEMORY = "0.4", "0.000001"  # of the machine's, above which nobody may publish
ANSWER_WITHIN = 30.0  # seconds
WITNESSED_WITHIN = 300.0  # seconds to read the copies of a whole run
RECOVERED_WITHIN = 20.0  # seconds for all queues after a crash

# A crash, but for one thing: RabbitMQ 3.10 writes the name of a new quorum queue to the disk half a second after it has
# answered. Without its name a queue has no leader ever again, and what it confirmed is gone; no client can prevent it.
CRASH = "[dets:sync(Names) || Names <- dets:all()], erlang:halt(137, [{flush, false}])."


class CountingRabbitMQ(RabbitMQ):
    """Knows at any time how many messages its queues hold, not only every five seconds."""

    def _variables(self) -> Mapping[str, str]:
        variables = super()._variables()
        arguments = f"{variables['RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS']} -rabbit quorum_tick_interval {TICK:.0f}"
        return {**variables, "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": arguments}


class Broker(ABC):
    """Where the queues of all services are."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._proxy = Proxy()
        self._looked_at, self._in_queues = 0.0, 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start_all(stack)
            stack.enter_context(self._proxy)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def _start_all(self, stack: ExitStack) -> None:
        """Have a broker."""

    @property
    @abstractmethod
    def _asked(self) -> RabbitMQ:
        """The node that answers what the rig asks."""

    @abstractmethod
    def link(self, name: str) -> Link:
        """A way through the proxy for one process."""

    # Faults.

    def alarm(self, on: bool) -> None:
        """Let the broker believe that it has no memory left."""
        self._asked.control("set_vm_memory_high_watermark", NO_MEMORY if on else USUAL_MEMORY)

    def unbind(self) -> None:
        asyncio.run(self._with_channel(lambda channel: channel.queue_unbind(LONELY_QUEUE, EXCHANGE, LONELY_BINDING)))

    def bind(self) -> None:
        asyncio.run(self._with_channel(lambda channel: channel.queue_bind(LONELY_QUEUE, EXCHANGE, LONELY_BINDING)))

    def delete_queue(self) -> None:
        asyncio.run(self._with_channel(lambda channel: channel.queue_delete(SPARE_QUEUE)))

    def is_queue_back(self) -> bool:
        """Whether it is there, and somebody consumes from it."""
        lines = self._listed("name", "consumers")
        return any(line.startswith(f"{SPARE_QUEUE}\t") and not line.endswith("\t0") for line in lines)

    # Looking.

    def waiting(self) -> int:
        """Messages in queues, as of a moment ago; whoever is down is asked again."""
        if time.monotonic() - self._looked_at > LOOK_EVERY:
            with suppress(ServerFailed):
                counts = dict(line.split("\t") for line in self._listed("name", "messages") if "\t" in line)
                self._in_queues = sum(
                    int(count)
                    for name, count in counts.items()
                    if not name.endswith(DEAD_LETTERS) and name != WITNESS and count.isdigit()
                )
                self._looked_at = time.monotonic()
        return self._in_queues

    def delivered(self) -> tuple[str, ...]:
        """Ids of messages in the order in which relays delivered them, copies among them, where that is witnessed."""
        return ()

    def final_queues(self) -> tuple[list[tuple[str, str]], list[Buried]]:
        """What waits, by message id and queue, and what is dead."""
        return asyncio.run(self._emptied())

    async def _emptied(self) -> tuple[list[tuple[str, str]], list[Buried]]:
        waiting, buried = [], []
        async with self._channel() as channel:
            for name in self._listed("name"):
                if name in ("name", WITNESS):  # a heading
                    continue
                async for message, envelope in _contents(channel, name):
                    if name.endswith(DEAD_LETTERS):
                        buried.append(_buried(message, envelope, name.removesuffix(DEAD_LETTERS)))
                    else:
                        waiting.append((message.id, name))
        return waiting, buried

    def _listed(self, *columns: str) -> list[str]:
        return self._asked.control("list_queues", "--silent", *columns).splitlines()

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        connection = await aiormq.connect(self._asked.url)
        try:
            yield await connection.channel()
        finally:
            await connection.close()

    async def _with_channel(self, work: object) -> None:
        async with self._channel() as channel:
            await work(channel)  # type: ignore[operator]


class SingleNode(Broker):
    """One node, which may crash with everything that it has not written to its disk."""

    def __init__(self) -> None:
        super().__init__()
        self._server = CountingRabbitMQ(management=False)
        self._has_crashed = False

    def _start_all(self, stack: ExitStack) -> None:
        stack.enter_context(self._server)

    @property
    def _asked(self) -> RabbitMQ:
        return self._server

    def link(self, name: str) -> Link:
        return self._proxy.broker_link(name, self._server.port)

    def crash(self) -> None:
        self._has_crashed = True
        with suppress(ServerFailed):  # it ends before it has answered
            self._server.control("eval", CRASH)
        self._server.kill()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        """Start it; after a crash once more, as an operator would, if RabbitMQ 3.10 left a quorum queue down."""
        self._server.start()
        if self._has_crashed and not self._has_all_queues():
            self._server.stop()
            self._server.start()
        self._has_crashed = False

    def _has_all_queues(self) -> bool:
        deadline = time.monotonic() + RECOVERED_WITHIN
        while time.monotonic() < deadline:
            if not any(line.endswith("\tdown") for line in self._listed("name", "state")):
                return True
            time.sleep(LOOK_EVERY)
        return False


class WitnessedNode(SingleNode):
    """The same, with a queue of the rig's that nothing consumes: its order is that in which relays delivered."""

    def _start_all(self, stack: ExitStack) -> None:
        super()._start_all(stack)
        asyncio.run(self._with_channel(_declare_witness))

    def delivered(self) -> tuple[str, ...]:
        return asyncio.run(self._witnessed())

    async def _witnessed(self) -> tuple[str, ...]:
        async with self._channel() as channel:
            declared = await channel.queue_declare(WITNESS, passive=True)
            ids: list[str] = []
            everything = asyncio.Event()

            async def take(delivery: DeliveredMessage) -> None:
                ids.append(delivery.header.properties.message_id or "")
                if len(ids) == declared.message_count:
                    everything.set()

            await channel.basic_consume(WITNESS, take, no_ack=True)
            async with asyncio.timeout(WITNESSED_WITHIN):
                await everything.wait()
        return tuple(ids)


async def _declare_witness(channel: AbstractChannel) -> None:
    await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
    await channel.queue_declare(WITNESS, durable=True, arguments={"x-queue-type": "quorum"})
    await channel.queue_bind(WITNESS, EXCHANGE, "#")


async def _contents(channel: AbstractChannel, queue: str) -> AsyncIterator[tuple[Message, Envelope]]:
    """Everything in a queue, taken out of it."""
    while True:
        got = await channel.basic_get(queue, no_ack=True, timeout=ANSWER_WITHIN)
        if got.header is None or got.delivery_tag is None:
            return
        envelope = Envelope.read(got.header.properties.marshal())
        yield envelope.message(got.routing_key or "", got.body), envelope


def _buried(message: Message, envelope: Envelope, queue: str) -> Buried:
    reason = envelope.headers["outbox-reason"][5:].decode()
    return Buried(Emitted.of(message), queue, reason, envelope.attempt_count, envelope.crashes or 0, envelope.history)
