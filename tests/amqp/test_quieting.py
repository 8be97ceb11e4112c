"""The log of a process whose broker is away: the observers' lines, and none of the client library's own."""

from __future__ import annotations

import logging

import aiormq
import pytest

from outbox.core.events import Troubled
from outbox.core.transport import Defaults
from outbox.transports.rabbitmq import RabbitmqTransport
from tests.amqp.peer import Peer
from tests.support.observing import Recorder, eventually


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "aiormq.connection" and each.levelno >= level]


@pytest.mark.parametrize("by_hand", [True, False], ids=["frames", "aio-pika"])
async def test_of_connections_that_end_or_do_not_open_only_the_observers_tell(
    peer: Peer, by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = Recorder()
    transport = RabbitmqTransport(peer.url, Defaults(observe=recorder), by_hand=by_hand)
    await transport.open()
    peer.connections[0].block("low on memory")
    peer.connections[0].close(320, "CONNECTION_FORCED")
    peer.accepts = False
    await eventually(lambda: len(peer.connections) > 3)
    assert any("CONNECTION_FORCED" in str(event.error) for event in recorder.of(Troubled))
    assert said(caplog, logging.DEBUG) == []
    caplog.set_level(logging.DEBUG, "aiormq.connection")
    await eventually(lambda: said(caplog, logging.DEBUG))
    assert said(caplog, logging.INFO) == []
    await transport.close()


async def test_of_other_connections_the_library_tells_as_before(
    peer: Peer, by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transport = RabbitmqTransport(peer.url, by_hand=by_hand)
    await transport.open()
    with pytest.raises(aiormq.exceptions.AMQPConnectionError):
        await aiormq.connect("amqp://guest:guest@127.0.0.1:1/")
    assert "error when creating transport" in "".join(said(caplog, logging.ERROR))
    await transport.close()
