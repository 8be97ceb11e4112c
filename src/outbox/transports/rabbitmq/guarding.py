"""Guarding: frames of our channels that the client library cannot read, on a connection that was given to us.

aiormq ends the connection over a header that it cannot read: one that is nested too deep, a text that is no UTF-8, a
time beyond the year 9999. The broker then delivers the same message again, for ever. So where aiormq gives up on a
delivery for one of our channels, it is read here, leniently, and dead-lettered by those who take it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from struct import Struct
from typing import Any

from aiormq.abc import AbstractConnection
from aiormq.connection import FrameReceiver
from pamqp import commands
from pamqp.header import ContentHeader

from outbox.core.errors import Undecodable
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.frames import announced

_METHOD, _HEADER = 1, 2
_FRAME, _INDEX, _BODY_SIZE = Struct(">BHI"), Struct(">I"), Struct(">Q")


class Unparsed(ContentHeader):
    """Properties as they came, too: the client library would write some of them otherwise, and some not at all."""

    def __init__(self, body_size: int, raw: bytes, properties: commands.Basic.Properties | None = None) -> None:
        super().__init__(body_size=body_size, properties=properties)
        self.raw = raw
        if properties is None:
            with suppress(Undecodable):
                self.properties.message_id = Envelope.read(raw).text("message_id")  # returns are told apart by it


class FrameGuard:
    """Stands before the frames of one connection."""

    def __init__(self, receiver: FrameReceiver) -> None:
        self.channels: set[int] = set()  # ours
        self._recorder = _Recorder(receiver.reader)
        receiver.reader = self._recorder  # type: ignore[assignment]
        self._get_frame = receiver.get_frame
        receiver.get_frame = self.get_frame  # type: ignore[method-assign]

    @classmethod
    def of(cls, connection: AbstractConnection) -> FrameGuard | None:
        """The one of this connection; none if the client library is not built as it was when this was written."""
        task = getattr(getattr(connection, "_reader_task", None), "task", None)
        frame = getattr(task.get_coro(), "cr_frame", None) if isinstance(task, asyncio.Task) else None
        receiver = frame.f_locals.get("frame_receiver") if frame is not None else None
        if not isinstance(receiver, FrameReceiver):
            return None
        guard = getattr(receiver.get_frame, "__self__", None)
        return guard if isinstance(guard, FrameGuard) else cls(receiver)

    async def get_frame(self) -> Any:
        """What aiormq calls for each frame."""
        parts = self._recorder.parts
        parts.clear()
        try:
            size, number, found = await self._get_frame()
        except Exception:
            read = self._read(b"".join(parts))
            if read is None:
                raise
            return read
        if isinstance(found, ContentHeader) and number in self.channels:
            found = Unparsed(found.body_size, parts[-1][12:-1], found.properties)
        return size, number, found

    def _read(self, data: bytes) -> tuple[int, int, object] | None:
        """A delivery's frame, if it is whole and ours."""
        if len(data) < _FRAME.size:
            return None
        kind, number, size = _FRAME.unpack_from(data)
        if number not in self.channels or len(data) != _FRAME.size + size + 1:
            return None
        if kind == _HEADER:
            body_size = _BODY_SIZE.unpack_from(data, _FRAME.size + 4)[0]
            return len(data), number, Unparsed(body_size, data[_FRAME.size + 12 : -1])
        if kind == _METHOD and _INDEX.unpack_from(data, _FRAME.size)[0] == commands.Basic.Deliver.index:
            return len(data), number, _delivery(data)
        return None


class _Recorder:
    """A stream that remembers what was read of it."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.parts: list[bytes] = []

    def at_eof(self) -> bool:
        at_eof: bool = self._reader.at_eof()
        return at_eof

    async def readexactly(self, count: int) -> bytes:
        part: bytes = await self._reader.readexactly(count)
        self.parts.append(part)
        return part

    async def read(self, count: int = -1) -> bytes:
        part: bytes = await self._reader.read(count)
        return part


def _delivery(data: bytes) -> commands.Basic.Deliver:
    """Its names may be no UTF-8."""
    incoming = announced(data, _FRAME.size + 4)
    deliver = commands.Basic.Deliver()
    deliver.consumer_tag, deliver.delivery_tag = incoming.consumer_tag, incoming.tag
    deliver.redelivered, deliver.exchange = incoming.redelivered, incoming.exchange
    deliver.routing_key = incoming.routing_key
    return deliver
