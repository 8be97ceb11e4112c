"""Declaring: makes what a topology says, or sees that it is there. Messages are not touched."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy
from outbox.transports.rabbitmq.mismatch import Mismatch, Severity
from outbox.transports.rabbitmq.topology import Exchange, Names, Queue, QueueBinding, Topology, open_ended

OpenChannel = Callable[[], Awaitable[AbstractChannel]]
Answered = TypeVar("Answered")

PRINTED = "`outbox topology MODULE:ATTRIBUTE` prints what the listeners need, for RabbitMQ's definitions or Terraform"

_CUT_OFF = "something else"

# Brokers cut their answers at 255 bytes, so only the beginning is certain to be there.
_INEQUIVALENT = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for (?:queue|exchange) ")
_CURRENT = re.compile(r" but current is (?:none|(?:the value )?'(?P<text>.*?)'(?: of type '(?P<type>\w+)')?)$")

_ALWAYS_THERE = "amq.direct"  # an exchange of every virtual host


@dataclass(frozen=True, slots=True)
class Declared:
    """What this user may do, and what could be better."""

    configures: bool  # it may make what is missing
    dead_letters: bool  # it may publish to the dead letter exchange
    weaker: tuple[Mismatch, ...] = ()  # queues that are used as they are


async def declare_for(
    open_channel: OpenChannel,
    names: Names,
    listeners: Sequence[Listener],
    retry_policy: RetryPolicy,
    *,
    server_version: tuple[int, ...] | None = None,
) -> tuple[Topology, Declared]:
    """Declare what these listeners need. Delays that cannot be listed are made when they are first wanted.

    A user that may not make them needs them all before it starts.
    """
    default = retry_policy.known_delays() or ()
    topology = Topology.of(names, listeners, default, server_version=server_version)
    declared = await declare(open_channel, topology)
    if not declared.configures and any(open_ended(listener, retry_policy) for listener in listeners):
        topology = Topology.of(names, listeners, default, server_version=server_version, steps=True)
        declared = await declare(open_channel, topology)
    if not declared.configures and not topology.delays:
        provisioned = Topology.of(names, listeners, default, server_version=server_version, way_back=True)
        with suppress(ConfigurationError):  # it is not there: what needs it is told then
            return provisioned, await declare(open_channel, provisioned)
    return topology, declared


async def declare(open_channel: OpenChannel, topology: Topology) -> Declared:
    """Make what is missing, or see that it is there if this user may not; ConfigurationError says what to do."""
    declaring = Declaring(ReopeningChannel(open_channel))
    try:
        for exchange in topology.exchanges:
            await declaring.exchange(exchange)
        for queue in topology.queues:
            await declaring.queue(queue)
        declaring.check()
        for binding in topology.bindings:
            await declaring.bind(binding)
        if topology.marker is not None:
            await declaring.mark(topology.marker)
        await declaring.check_publishing(topology.publishes)
        if declaring.refused:
            await declaring.check_consuming(topology.consumed)
        return Declared(
            configures=not declaring.refused,
            dead_letters=topology.marker is None or await declaring.may_publish(topology.names.dead_letter_exchange),
            weaker=tuple(declaring.weaker),
        )
    finally:
        await declaring.asking.close()


class ReopeningChannel:
    """Questions to the broker: a refused one costs the channel, so that the next gets another."""

    def __init__(self, open_channel: OpenChannel) -> None:
        self._open = open_channel
        self._channel: AbstractChannel | None = None

    async def ask(self, question: Callable[[AbstractChannel], Awaitable[Answered]]) -> Answered:
        channel = self._channel = self._channel or await self._open()
        try:
            return await question(channel)
        except ChannelClosed:
            self._channel = None
            raise

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


@dataclass
class Declaring:
    """What has been declared so far, and what stood in the way."""

    asking: ReopeningChannel
    refused: set[str] = field(default_factory=set)  # kinds of things that this user may not make
    missing: list[str] = field(default_factory=list)
    wrong: list[Mismatch] = field(default_factory=list)
    weaker: list[Mismatch] = field(default_factory=list)

    async def exchange(self, exchange: Exchange) -> None:
        await self._make_or_find(
            "exchange",
            exchange.name,
            make=lambda: self.declare_exchange(exchange),
            find=lambda channel: channel.exchange_declare(exchange.name, passive=True),
        )

    async def queue(self, queue: Queue) -> None:
        await self._make_or_find(
            "queue",
            queue.name,
            make=lambda: self.declare_queue(queue),
            find=lambda channel: channel.queue_declare(queue.name, passive=True),
        )

    def check(self) -> None:
        """Tell everything that is in the way at once."""
        if self.missing:
            raise ConfigurationError(
                f"RabbitMQ lacks {', '.join(self.missing)}, and this user may not make what is missing: {PRINTED}"
            )
        if self.wrong:
            ways = "; ".join(dict.fromkeys(mismatch.way_out for mismatch in self.wrong))
            raise ConfigurationError(
                f"{'; '.join(map(str, self.wrong))}. RabbitMQ does not change what exists: let its messages be "
                f"handled, delete it ({ways}) and start again; or use another queue=, queue_prefix= or exchange_name="
            )

    async def bind(self, binding: QueueBinding) -> None:
        if "binding" in self.refused:
            return
        try:
            await self.asking.ask(
                lambda channel: channel.queue_bind(binding.queue, binding.exchange, binding.routing_key)
            )
        except ChannelAccessRefused:
            self.refused.add(
                "binding"
            )  # there is no way to ask whether it exists: the marker says that a process saw to it

    async def mark(self, marker: Exchange) -> None:
        """Say that all of it is there; or see that a process which may do so has."""
        if not self.refused:
            await self.exchange(marker)
        elif not await self._found(lambda channel: channel.exchange_declare(marker.name, passive=True)):
            raise ConfigurationError(
                f"RabbitMQ has no exchange {marker.name!r}, which says that the queues were made for this library: "
                "delay queues made for another may hand a retry to every listener, or to none. This user may not make "
                f"or change them: {PRINTED}"
            )
        self.check()

    async def check_publishing(self, exchanges: Iterable[str]) -> None:
        closed = [name for name in exchanges if not await self.may_publish(name)]
        if closed:
            raise _not_permitted("publish to", "exchange", closed, "write")

    async def check_consuming(self, queues: Iterable[str]) -> None:
        closed = [name for name in queues if not await self._may_consume(name)]
        if closed:
            raise _not_permitted("consume from", "queue", closed, "read")

    async def may_publish(self, exchange: str) -> bool:
        """Ask without a message: to remove a binding that does not exist takes the same right, and does nothing."""
        try:
            await self.asking.ask(lambda channel: channel.exchange_unbind(exchange, _ALWAYS_THERE, "no such binding"))
        except ChannelAccessRefused as error:
            # The destination is looked at first; that the source may not be read says that it was passed.
            return f"'{_ALWAYS_THERE}'" in str(error)
        return True

    async def _may_consume(self, queue: str) -> bool:
        """Ask without taking anything: rights are looked at first, and then such a priority is no number."""
        try:
            await self.asking.ask(
                lambda channel: channel.basic_consume(queue, _take_nothing, arguments={"x-priority": "none"})
            )
        except ChannelAccessRefused:
            return False
        except ChannelPreconditionFailed:
            pass
        return True

    async def _make_or_find(
        self,
        what: str,
        name: str,
        *,
        make: Callable[[], Awaitable[None]],
        find: Callable[[AbstractChannel], Awaitable[object]],
    ) -> None:
        # The broker's log has a line for each refusal: a process that was refused once looks before it asks again.
        if what in self.refused and await self._found(find):
            return
        try:
            await make()
        except ChannelAccessRefused:
            self.refused.add(what)
            if not await self._found(find):
                self.missing.append(f"{what} {name!r}")
        except ChannelLockedResource:
            raise ConfigurationError(
                f"the {what} {name!r} belongs to one connection alone: delete it, or use another name"
            ) from None

    async def _found(self, find: Callable[[AbstractChannel], Awaitable[object]]) -> bool:
        """Whether it is there, as far as this user is told.

        RabbitMQ from 4.3 on tells only those who have some right on the name, and a worker needs none on some of them.
        """
        try:
            await self.asking.ask(find)
        except ChannelNotFoundEntity:
            return False
        except ChannelAccessRefused:
            pass
        return True

    async def declare_exchange(self, exchange: Exchange) -> None:
        try:
            await self.asking.ask(
                lambda channel: channel.exchange_declare(exchange.name, exchange_type=exchange.kind, durable=True)
            )
        except ChannelPreconditionFailed as error:
            wanted = {"type": exchange.kind}
            argument, there = _difference(error, wanted)
            self._note(Mismatch("exchange", exchange.name, argument, there, wanted.get(argument)))

    async def declare_queue(self, queue: Queue) -> None:
        """Declare it; where it exists otherwise, ask again with what it has: the broker names one argument a time."""
        wanted = {**queue.arguments, "durable": True}
        arguments: dict[str, Any] = dict(queue.arguments)
        differing: set[str] = set()
        while True:
            try:
                await self.asking.ask(
                    lambda channel: channel.queue_declare(
                        queue.name, durable="durable" not in differing, arguments=arguments
                    )
                )
            except ChannelPreconditionFailed as error:
                argument, there = _difference(error, wanted)
                if argument in differing:
                    return  # its value was cut off, so that none can be found behind it
                differing.add(argument)
                self._note(Mismatch("queue", queue.name, argument, there, wanted.get(argument)))
                arguments.pop(argument, None)
                if argument.startswith("x-") and there not in (None, _CUT_OFF):
                    arguments[argument] = there
            else:
                return

    def _note(self, mismatch: Mismatch) -> None:
        if mismatch.weight is Severity.WRONG:
            self.wrong.append(mismatch)
        elif mismatch.weight is Severity.WEAKER:
            self.weaker.append(mismatch)


async def _take_nothing(message: object) -> None:
    """Nothing is ever delivered to it."""


def _not_permitted(verb: str, what: str, names: Sequence[str], permission: str) -> ConfigurationError:
    listed = ", ".join(f"{what} {name!r}" for name in names)
    pattern = "|".join(map(re.escape, names))
    return ConfigurationError(
        f"this user may not {verb} {listed}: give it a {permission} permission that matches ^({pattern})$; "
        "`outbox topology MODULE:ATTRIBUTE` prints all that are needed"
    )


def _difference(error: ChannelPreconditionFailed, wanted: Mapping[str, object]) -> tuple[str, object]:
    """Which argument differs, and what it is now."""
    text = str(error)
    found = _INEQUIVALENT.search(text)
    if found is None:
        raise ConfigurationError(f"RabbitMQ does not take what the listeners need: {text}") from error
    current = _CURRENT.search(text)
    argument = found["argument"]
    return argument, _CUT_OFF if current is None else _value(current["text"], current["type"], wanted.get(argument))


def _value(text: str | None, kind: str | None, wanted: object) -> object:
    """What a broker wrote; it names no type where the two have the same."""
    if kind == "bool" or isinstance(wanted, bool):
        return text == "true"
    if text is None or kind == "longstr" or (kind is None and not isinstance(wanted, int)):
        return text
    return int(text)
