"""AMQP as a hostile publisher writes it: byte by byte, whatever a client library would refuse to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from struct import pack
from typing import Any

from pamqp import commands, encode, frame
from yarl import URL

from outbox.transports.rabbitmq.channel import Lost
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.frames import FrameChannel, FrameConnection
from outbox.transports.rabbitmq.tables import PROPERTIES

LONG = 60.0  # seconds after which a broker that does not answer is lost


def properties(table: bytes = b"", **others: bytes) -> bytes:
    """Properties with this header table; the others as they travel, without the length of a short text."""
    parts = {"headers": pack(">I", len(table)) + table}
    for name, value in others.items():
        parts[name] = value if name in ("timestamp", "priority", "delivery_mode") else bytes([len(value)]) + value
    flags = sum(bit for name, bit in PROPERTIES if name in parts)
    return pack(">H", flags) + b"".join(parts[name] for name, _ in PROPERTIES if name in parts)


def header(name: str | bytes, value: Any) -> bytes:
    """One entry of a header table; bytes are a value as it travels."""
    name = name if isinstance(name, bytes) else name.encode()
    return bytes([len(name)]) + name + (value if isinstance(value, bytes) else encode.encode_table_value(value))


def nested(levels: int, *, tables: bool = False) -> bytes:
    """A value in so many lists, or tables."""
    value = b"t\x01"
    for _ in range(levels):
        value = (
            b"F" + pack(">I", len(value) + 2) + b"\x01k" + value if tables else b"A" + pack(">I", len(value)) + value
        )
    return value


def listed(values: Sequence[bytes]) -> bytes:
    """A list of values as they travel."""
    content = b"".join(values)
    return b"A" + pack(">I", len(content)) + content


class Stranger:
    """A publisher with a connection of its own, opened anew when the broker closes it."""

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._wire: FrameConnection | None = None
        self._channel: FrameChannel | None = None

    async def publish(self, exchange: str, routing_key: str | bytes, data: bytes, body: bytes) -> bool:
        """Whether the broker took it."""
        key = routing_key if isinstance(routing_key, str) else "?" * len(routing_key)
        try:
            channel = await self._ready()
            if isinstance(routing_key, bytes):
                method = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
                written = frame.marshal(method, channel._number)
                channel._routes[exchange, key] = written.replace(key.encode(), routing_key)
            [answer] = await channel.publish([Outgoing(exchange, key, data, body, "")], LONG)
        except Lost:
            return False
        return answer is BrokerAnswer.CONFIRMED

    async def publish_all(self, batch: Sequence[Outgoing]) -> None:
        assert set(await (await self._ready()).publish(batch, LONG)) == {BrokerAnswer.CONFIRMED}

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()

    async def _ready(self) -> FrameChannel:
        if self._wire is None or self._wire.ended.done():
            self._wire = await FrameConnection.connect(self._url, "a stranger")
        if self._channel is None or self._channel.ended.done():
            self._channel = await self._wire.channel()
        return self._channel


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[Stranger]:
    publisher = Stranger(url)
    try:
        async with asyncio.timeout(LONG):
            yield publisher
    finally:
        await publisher.close()
