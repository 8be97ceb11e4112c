"""What frames.py relies on: whoever updates aiormq or pamqp learns here what has changed.

If one of these fails, `RabbitmqTransport(url, by_hand=False)` still works with the library's public interface alone.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import aiormq
import pytest
from aiormq.connection import FrameReceiver, TransportFactory
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from outbox.transports.rabbitmq.frames import Tap


def test_aiormq_asks_for_its_socket() -> None:
    assert "transport_factory" in inspect.signature(aiormq.Connection.__init__).parameters
    assert list(inspect.signature(TransportFactory.create).parameters) == ["self", "url", "kwargs"]
    assert {"closing", "connect", "channel", "close", "ready"} <= set(dir(aiormq.Connection))


def test_aiormq_reads_frames_by_what_a_tap_offers() -> None:
    used = set(inspect.getsource(FrameReceiver).split("self.reader.")[1:])
    assert {text.split("(")[0] for text in used} == {"at_eof", "readexactly", "read"}


def test_asyncio_feeds_its_reader_by_the_methods_that_a_tap_overrides() -> None:
    source = inspect.getsource(asyncio.StreamReaderProtocol)
    assert ".feed_data(data)" in source and ".feed_eof()" in source and ".set_exception(" in source


@pytest.mark.parametrize(
    ("method", "index"),
    [
        (commands.Basic.Deliver, 0x003C003C),
        (commands.Basic.Return, 0x003C0032),
        (commands.Basic.Ack, 0x003C0050),
        (commands.Basic.Nack, 0x003C0078),
        (commands.Basic.Cancel, 0x003C001E),
        (commands.Channel.Close, 0x00140028),
        (commands.Channel.CloseOk, 0x00140029),
    ],
)
def test_pamqp_numbers_methods_as_the_protocol_does(method: Any, index: int) -> None:
    assert method.index == index
    assert commands.INDEX_MAPPING[index] is method


class Listening:
    """A channel that remembers its frames."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def take(self, kind: int, data: bytes, start: int, end: int) -> None:
        self.frames.append((kind, data[start:end]))


FOREIGN = frame.marshal(commands.Basic.QosOk(), 1) + frame.marshal(Heartbeat(), 0)
OURS = (
    frame.marshal(commands.Basic.Deliver("c", 1, False, "e", "k"), 7)
    + frame.marshal(ContentHeader(body_size=5), 7)
    + frame.marshal(ContentBody(b"\xce\x01\x00\x07\x00"), 7)
)


@given(st.lists(st.integers(1, len(FOREIGN + OURS) * 2), max_size=30))
def test_however_the_bytes_come_each_frame_goes_to_its_own_reader(cuts: list[int]) -> None:
    async def read() -> tuple[bytes, list[tuple[int, bytes]]]:
        tap, ours = Tap(), Listening()
        tap.channels[7] = ours  # type: ignore[assignment]
        data = FOREIGN + OURS + FOREIGN + OURS
        at = 0
        for cut in sorted({*cuts, len(data)}):
            tap.feed_data(data[at:cut])
            at = cut
        tap.feed_eof()
        return await tap.read(), ours.frames

    foreign, ours = asyncio.run(read())
    assert foreign == FOREIGN * 2
    assert [kind for kind, _ in ours] == [1, 2, 3] * 2
    assert ours[2][1] == b"\xce\x01\x00\x07\x00"


@pytest.mark.parametrize(
    "data", [b"\x01\x00\x07\x00\x00\x00\x01xx", b"\x01\x00\x07\xff\xff\xff\xff"], ids=["no end", "too large"]
)
async def test_what_is_no_frame_ends_the_connection(data: bytes) -> None:
    tap = Tap()
    reasons: list[str] = []
    tap.on_end = reasons.append
    tap.feed_data(data)
    assert len(reasons) == 1
    with pytest.raises(ConnectionError):
        await tap.read()


async def test_a_server_of_another_version_is_left_to_aiormq() -> None:
    tap = Tap()
    tap.feed_data(b"AMQP\x00\x01\x00\x00")
    tap.feed_eof()
    assert await tap.read() == b"AMQP\x00\x01\x00\x00"
