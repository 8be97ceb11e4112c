"""A relay whose broker is away, blocked or silent: it leaves its messages alone until the broker takes some again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aio_pika
import pytest
from pamqp.commands import Channel

from outbox import Outbox
from outbox.core.errors import TransportClosed
from outbox.core.events import Relayed, Troubled
from outbox.outbound import relay as relay_module
from outbox.transports.rabbitmq import RabbitmqTransport, aiormq_channel, frames
from tests.amqp.peer import Peer
from tests.support.observing import PATIENCE, Recorder, Statements, eventually
from tests.support.outboxes import emit

BACK_WITHIN = 3 * 5.0  # seconds after the broker's return; 5 are promised
PAUSE = 0.02  # seconds: a relay that would claim again does so many times in the moment in which a test looks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORTEST_TROUBLE", "LONGEST_TROUBLE"):
        monkeypatch.setattr(relay_module, name, PAUSE)
    for module in (frames, aiormq_channel):
        monkeypatch.setattr(module, "ANSWER_WITHIN", 1.0)


@pytest.fixture
async def outbox(peer: Peer, by_hand: bool, tmp_path: Path, recorder: Recorder) -> AsyncIterator[Outbox]:
    transport = RabbitmqTransport(peer.url, by_hand=by_hand, answer_within=1.0)
    url = f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    outbox = Outbox(db_engine_url=url, transport=transport, observers=[recorder], poll_interval=PAUSE)
    yield outbox
    await outbox.close()


def goes_away(peer: Peer) -> None:
    peer.accepts = False
    peer.connections[-1].reset()


def comes_back(peer: Peer) -> None:
    peer.accepts = True


def blocks(peer: Peer) -> None:
    peer.connections[-1].block("low on memory")


def unblocks(peer: Peer) -> None:
    peer.connections[-1].unblock()


def falls_silent(peer: Peer) -> None:
    """Publishes are not answered either, because nobody does."""
    peer.replies[Channel.Open] = lambda _: None


def speaks_again(peer: Peer) -> None:
    del peer.replies[Channel.Open]


@pytest.mark.parametrize(
    ("ends", "returns"),
    [(goes_away, comes_back), (blocks, unblocks), (falls_silent, speaks_again)],
    ids=["away", "blocked", "silent"],
)
async def test_a_relay_claims_nothing_until_its_broker_takes_messages_again(
    peer: Peer, outbox: Outbox, recorder: Recorder, ends: Callable[[Peer], None], returns: Callable[[Peer], None]
) -> None:
    async with outbox.running(relay=True):
        await emit(outbox, "first")
        await confirm(peer)
        await recorder.wait_for(Relayed)
        ends(peer)
        await eventually(lambda: _is_troubled(outbox, recorder))
        await eventually(lambda: _nothing_leased(outbox))
        with Statements() as statements:
            await emit(outbox, "late")
            await asyncio.sleep(50 * PAUSE)
        assert [each for each in statements if each.startswith("UPDATE")] == []
        waiting = await outbox.messages(state="waiting")
        assert {(each.attempt_count, each.crash_count) for each in waiting} == {(0, 0)}
        returns(peer)
        confirming = asyncio.create_task(confirm_everything(peer))
        async with asyncio.timeout(BACK_WITHIN):
            await eventually(lambda: _nothing_waits(outbox))
        confirming.cancel()


async def confirm(peer: Peer) -> None:
    published = await peer.published()
    published.channel.ack(published.tag)


async def confirm_everything(peer: Peer) -> None:
    while True:
        await confirm(peer)


async def _is_troubled(outbox: Outbox, recorder: Recorder) -> bool:
    """Emit until the relay has noticed: what it sent before counts as sent, or is in doubt."""
    if any(event.where == "relay" for event in recorder.of(Troubled)):
        return True
    await emit(outbox, "second")
    return False


async def _nothing_leased(outbox: Outbox) -> bool:
    return not (await outbox.store.inspection.backlog()).leased


async def _nothing_waits(outbox: Outbox) -> bool:
    return not await outbox.messages(state="waiting")


async def test_a_connection_that_is_closed_for_good_is_not_waited_for(peer: Peer) -> None:
    given = await aio_pika.connect(peer.url)
    transport = RabbitmqTransport(given)
    await transport.open()
    await given.close()
    with pytest.raises(TransportClosed):
        await asyncio.wait_for(transport.back(), PATIENCE)
    await transport.close()
