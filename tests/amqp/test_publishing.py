"""Publishing to a broker that does what a real one seldom does: every message is confirmed by its own answer alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from pamqp import frame
from pamqp.commands import Basic, Channel, Connection

from outbox import Message
from outbox.core.errors import TransportUnavailable
from outbox.core.transport import Published, Transport
from tests.amqp import peer as peers
from tests.amqp.peer import LONG, Peer
from tests.amqp.transports import connected


@pytest.fixture
async def transport(peer: Peer, by_hand: bool) -> AsyncIterator[Transport]:
    async with connected(peer.url, by_hand) as transport:
        yield transport


def messages(count: int, **fields: object) -> list[Message]:
    return [Message(routing_key="order.created", body=b"{}", **fields) for _ in range(count)]  # type: ignore[arg-type]


def publish(transport: Transport, batch: list[Message]) -> asyncio.Task[Published]:
    return asyncio.create_task(transport.publish(batch))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not is_so():
            await asyncio.sleep(0.01)


async def publish_until_confirmed(transport: Transport, peer: Peer, batch: list[Message]) -> None:
    """Publish like a relay, again and again, to a peer that confirms everything."""
    confirming = asyncio.create_task(confirm_everything(peer))
    try:
        async with asyncio.timeout(LONG):
            while True:
                try:
                    published = await transport.publish(batch)
                except TransportUnavailable:
                    published = Published()
                if published.confirmed == {message.id for message in batch}:
                    return
                await asyncio.sleep(0.05)
    finally:
        confirming.cancel()


async def confirm_everything(peer: Peer) -> None:
    while True:
        one = await peer.published()
        one.channel.ack(one.tag)


# Answers


async def test_an_ack_confirms_a_message_that_asks_for_it_and_survives_a_restart(
    peer: Peer, transport: Transport
) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    assert published.method.mandatory
    assert published.properties.delivery_mode == 2
    assert published.properties.message_id == message.id
    assert (published.method.routing_key, published.body) == ("order.created", b"{}")
    published.channel.ack(published.tag)
    assert await publishing == Published(frozenset([message.id]))


async def test_a_message_that_was_returned_is_refused_though_its_ack_follows(peer: Peer, transport: Transport) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    published.channel.give_back(published)
    published.channel.ack(published.tag)
    done = await publishing
    assert not done.confirmed
    assert not done.refused[message.id].permanent


async def test_of_many_alike_only_the_one_that_was_returned_is_refused(peer: Peer, transport: Transport) -> None:
    batch = messages(5)
    publishing = publish(transport, batch)
    published = await peer.several_published(5)
    published[3].channel.give_back(published[3])
    published[4].channel.ack(published[4].tag, multiple=True)
    done = await publishing
    assert set(done.refused) == {batch[3].id}
    assert done.confirmed == {message.id for message in batch if message is not batch[3]}


async def test_a_returned_message_of_many_frames_is_refused(peer: Peer, transport: Transport) -> None:
    message = Message(routing_key="large", body=b"x" * 300_000)
    publishing = publish(transport, [message])
    published = await peer.published()
    assert published.body == message.body
    published.channel.give_back(published)
    published.channel.ack(published.tag)
    assert set((await publishing).refused) == {message.id}


async def test_all_that_were_returned_are_refused(peer: Peer, transport: Transport) -> None:
    batch = messages(3)
    publishing = publish(transport, batch)
    published = await peer.several_published(3)
    for one in published:
        one.channel.give_back(one)
    published[-1].channel.ack(published[-1].tag, multiple=True)
    done = await publishing
    assert (done.confirmed, set(done.refused)) == (frozenset(), {message.id for message in batch})


async def test_a_nack_confirms_nothing_and_is_not_for_ever(peer: Peer, transport: Transport) -> None:
    batch = messages(2)
    publishing = publish(transport, batch)
    first, second = await peer.several_published(2)
    first.channel.nack(first.tag)
    second.channel.ack(second.tag)
    done = await publishing
    assert done.confirmed == {batch[1].id}
    assert not any(refusal.permanent for refusal in done.refused.values())


async def test_a_nack_of_many_leaves_the_last_to_its_own_ack(peer: Peer, transport: Transport) -> None:
    batch = messages(4)
    publishing = publish(transport, batch)
    published = await peer.several_published(4)
    published[2].channel.nack(published[2].tag, multiple=True)
    published[3].channel.ack(published[3].tag)
    assert (await publishing).confirmed == {batch[3].id}


async def test_an_ack_of_many_confirms_all_before_it_and_none_after_it(peer: Peer, transport: Transport) -> None:
    batch = messages(4)
    publishing = publish(transport, batch)
    published = await peer.several_published(4)
    published[2].channel.ack(published[2].tag, multiple=True)
    published[3].channel.nack(published[3].tag)
    assert (await publishing).confirmed == {message.id for message in batch[:3]}


async def test_an_ack_of_many_does_not_confirm_what_was_nacked_before(peer: Peer, transport: Transport) -> None:
    batch = messages(3)
    publishing = publish(transport, batch)
    published = await peer.several_published(3)
    published[1].channel.nack(published[1].tag)
    published[2].channel.ack(published[2].tag, multiple=True)
    assert (await publishing).confirmed == {batch[0].id, batch[2].id}


async def test_acks_in_any_order_confirm_each_its_own(peer: Peer, transport: Transport) -> None:
    batch = messages(4)
    publishing = publish(transport, batch)
    published = await peer.several_published(4)
    for position in (3, 0, 2):
        published[position].channel.ack(published[position].tag)
    published[1].channel.nack(published[1].tag)
    assert (await publishing).confirmed == {batch[0].id, batch[2].id, batch[3].id}


async def test_an_ack_that_comes_twice_confirms_once(peer: Peer, transport: Transport) -> None:
    batch = messages(2)
    publishing = publish(transport, batch)
    first, second = await peer.several_published(2)
    first.channel.ack(first.tag)
    first.channel.ack(first.tag)
    second.channel.nack(second.tag)
    assert (await publishing).confirmed == {batch[0].id}


async def test_two_batches_at_once_have_answers_of_their_own(peer: Peer, transport: Transport) -> None:
    one, other = messages(2), messages(2)
    first, second = publish(transport, one), publish(transport, other)
    published = {each.properties.message_id: each for each in await peer.several_published(4)}
    for message in (one[0], other[0], other[1]):
        published[message.id].channel.ack(published[message.id].tag)
    refused = published[one[1].id]
    refused.channel.nack(refused.tag)
    assert (await first).confirmed == {one[0].id}
    assert (await second).confirmed == {message.id for message in other}


async def test_an_ack_that_comes_byte_by_byte_confirms(peer: Peer, transport: Transport) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    for byte in frame.marshal(Basic.Ack(published.tag, False), published.channel.number):
        published.channel.connection.write(bytes([byte]))
        await asyncio.sleep(0.001)
    assert (await publishing).confirmed == {message.id}


async def test_a_body_larger_than_a_frame_arrives_whole(by_hand: bool) -> None:
    async with Peer(frame_max=4096) as peer, connected(peer.url, by_hand) as transport:
        message = Message(routing_key="large", body=bytes(range(256)) * 100)
        publishing = publish(transport, [message])
        published = await peer.published()
        assert published.body == message.body
        published.channel.ack(published.tag)
        assert (await publishing).confirmed == {message.id}


async def test_an_empty_body_is_published_and_confirmed(peer: Peer, transport: Transport) -> None:
    message = Message(routing_key="empty", body=b"")
    publishing = publish(transport, [message])
    published = await peer.published()
    assert published.body == b""
    published.channel.ack(published.tag)
    assert (await publishing).confirmed == {message.id}


# Doubt


async def test_silence_confirms_nothing_and_the_next_batch_is_answered_for_itself(peer: Peer, by_hand: bool) -> None:
    async with connected(peer.url, by_hand, answer_within=0.5) as transport:
        publishing = publish(transport, messages(1))
        peer.replies[Channel.Close] = lambda _: None  # the ack is on its way when the client gives its channel up
        late = await peer.published()
        done = await publishing
        assert (done.confirmed, dict(done.refused)) == (frozenset(), {})

        publishing = publish(transport, messages(1))
        published = await peer.published()
        late.channel.ack(late.tag)  # whose number the next message may have on its own channel
        published.channel.nack(published.tag)
        assert not (await publishing).confirmed
        del peer.replies[Channel.Close]


async def test_a_connection_that_is_cut_leaves_only_the_unanswered_in_doubt(peer: Peer, transport: Transport) -> None:
    batch = messages(2)
    publishing = publish(transport, batch)
    first, _ = await peer.several_published(2)
    first.channel.ack(first.tag)
    await asyncio.sleep(0.1)  # a reset may overtake what was sent before it: then nothing is confirmed, which is right
    first.channel.connection.reset()
    done = await publishing
    assert done.confirmed <= {batch[0].id}
    assert dict(done.refused) == {}
    await publish_until_confirmed(transport, peer, [batch[1]])
    assert len(peer.connections) > 1


async def test_half_an_ack_confirms_nothing(peer: Peer, transport: Transport) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    ack = frame.marshal(Basic.Ack(published.tag, False), published.channel.number)
    published.channel.connection.write(ack[:-1])
    published.channel.connection.reset()
    done = await publishing
    assert (done.confirmed, dict(done.refused)) == (frozenset(), {})
    await publish_until_confirmed(transport, peer, [message])


async def test_bytes_that_are_no_frame_end_the_connection_and_confirm_nothing(by_hand: bool) -> None:
    # The client library waits for the gigabytes that such bytes announce, until it misses heartbeats.
    async with Peer() as peer, connected(f"{peer.url}?heartbeat=1", by_hand) as transport:
        [message] = messages(1)
        publishing = publish(transport, [message])
        published = await peer.published()
        published.channel.connection.write(b"\x09garbage that nobody can read" * 100)
        assert not (await publishing).confirmed
        await publish_until_confirmed(transport, peer, [message])


async def test_a_broker_that_stops_leaves_the_unanswered_in_doubt_and_is_found_again(
    peer: Peer, transport: Transport
) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    published.channel.connection.close(320, "CONNECTION_FORCED - broker forced connection closure")
    done = await publishing
    assert (done.confirmed, dict(done.refused)) == (frozenset(), {})
    await publish_until_confirmed(transport, peer, [message])


async def test_an_ack_right_before_the_broker_stops_confirms(peer: Peer, transport: Transport) -> None:
    batch = messages(2)
    publishing = publish(transport, batch)
    first, _ = await peer.several_published(2)
    closing = frame.marshal(Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0)
    ack = frame.marshal(Basic.Ack(first.tag, False), first.channel.number)
    first.channel.connection.write(ack + closing)
    assert (await publishing).confirmed == {batch[0].id}


async def test_a_broker_that_falls_silent_is_noticed_by_its_missing_heartbeats(by_hand: bool) -> None:
    async with Peer() as peer, connected(f"{peer.url}?heartbeat=1", by_hand) as transport:
        peer.connections[0].hush()
        await publish_until_confirmed(transport, peer, messages(1))
        assert len(peer.connections) > 1


async def test_a_publish_that_is_cancelled_lends_its_answer_to_nobody(peer: Peer, transport: Transport) -> None:
    publishing = publish(transport, messages(1))
    abandoned = await peer.published()
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing

    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    abandoned.channel.ack(abandoned.tag)
    published.channel.nack(published.tag)
    assert not (await publishing).confirmed


async def test_a_publish_cancelled_beside_another_does_not_disturb_it(peer: Peer, transport: Transport) -> None:
    batch = messages(1)
    first, second = publish(transport, messages(1)), publish(transport, batch)
    published = {each.properties.message_id: each for each in await peer.several_published(2)}
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    kept = published[batch[0].id]
    kept.channel.ack(kept.tag, multiple=True)
    assert (await second).confirmed == {batch[0].id}


# Channels that the broker closes


async def close_channels_over(peer: Peer, is_bad: Callable[[peers.Published], bool], code: int, text: str) -> None:
    """Confirm what is published, but close the channel over what is bad."""
    while True:
        published = await peer.published()
        if is_bad(published):
            published.channel.close(code, text)
        else:
            published.channel.ack(published.tag)


async def published_beside(peer: Peer, transport: Transport, batch: list[Message], code: int, text: str) -> Published:
    bad = batch[len(batch) // 2].id
    playing = asyncio.create_task(
        close_channels_over(peer, lambda published: published.properties.message_id == bad, code, text)
    )
    try:
        return await transport.publish(batch)
    finally:
        playing.cancel()


async def test_a_channel_closed_over_one_message_refuses_it_alone(peer: Peer, transport: Transport) -> None:
    batch = messages(9)
    text = "PRECONDITION_FAILED - message size 200000000 is larger than configured max size 134217728"
    done = await published_beside(peer, transport, batch, 406, text)
    assert set(done.refused) == {batch[4].id}
    assert "PRECONDITION_FAILED" in done.refused[batch[4].id].error
    assert done.confirmed == {message.id for message in batch if message is not batch[4]}
    assert len(peer.connections) == 1


async def test_a_channel_closed_over_a_topic_that_is_not_allowed_refuses_it_for_now(
    peer: Peer, transport: Transport
) -> None:
    batch = messages(3)
    text = "ACCESS_REFUSED - access to topic 'order.created' in exchange 'outbox' in vhost '/' refused for user 'guest'"
    done = await published_beside(peer, transport, batch, 403, text)
    assert set(done.refused) == {batch[1].id}
    assert not done.refused[batch[1].id].permanent
    assert done.confirmed == {batch[0].id, batch[2].id}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, "NOT_FOUND - no exchange 'outbox' in vhost '/'"),
        (403, "ACCESS_REFUSED - access to exchange 'outbox' in vhost '/' refused for user 'guest'"),
    ],
)
async def test_an_exchange_that_is_missing_or_forbidden_confirms_nothing_and_kills_nothing_for_ever(
    peer: Peer, transport: Transport, code: int, text: str
) -> None:
    batch = messages(4)
    playing = asyncio.create_task(close_channels_over(peer, lambda _: True, code, text))
    try:
        done = await transport.publish(batch)
        assert not done.confirmed
        assert not any(refusal.permanent for refusal in done.refused.values())
    except TransportUnavailable:
        pass  # nothing was taken, so this is as true
    finally:
        playing.cancel()
    await publish_until_confirmed(transport, peer, batch)


async def test_a_channel_closed_between_two_batches_is_opened_again(peer: Peer, transport: Transport) -> None:
    await publish_until_confirmed(transport, peer, messages(1))
    peer.connections[0].channels[max(peer.connections[0].channels)].close(541, "INTERNAL_ERROR")
    await publish_until_confirmed(transport, peer, messages(1))
    assert len(peer.connections) == 1


# A broker that takes nothing


async def test_while_the_broker_is_blocked_nothing_is_sent_and_nobody_loses_an_attempt(
    peer: Peer, transport: Transport, by_hand: bool
) -> None:
    await publish_until_confirmed(transport, peer, messages(1))
    batch = messages(1)
    peer.connections[0].block("low on memory")
    with pytest.raises(TransportUnavailable, match="low on memory" if by_hand else "takes no publishes"):
        async with asyncio.timeout(LONG):
            while True:  # until the word has arrived, it may still publish
                done = publish(transport, messages(1))
                confirming = asyncio.create_task(confirm_everything(peer))
                try:
                    await done
                finally:
                    confirming.cancel()
    while peer.has_published:
        await peer.published()
    with pytest.raises(TransportUnavailable):
        await transport.publish(batch)
    assert not peer.has_published
    peer.connections[0].unblock()
    await publish_until_confirmed(transport, peer, batch)
    assert len(peer.connections) == 1


async def test_a_batch_that_was_sent_before_the_broker_blocked_is_confirmed_when_it_answers(
    peer: Peer, transport: Transport
) -> None:
    [message] = messages(1)
    publishing = publish(transport, [message])
    published = await peer.published()
    published.channel.connection.block()
    published.channel.connection.unblock()
    published.channel.ack(published.tag)
    assert (await publishing).confirmed == {message.id}


async def test_a_broker_that_is_away_takes_nothing_until_it_is_back(peer: Peer, transport: Transport) -> None:
    peer.accepts = False
    peer.connections[0].reset()
    async with asyncio.timeout(LONG):
        with pytest.raises(TransportUnavailable):
            while True:
                await transport.publish(messages(1))
    peer.accepts = True
    await publish_until_confirmed(transport, peer, messages(1))


async def test_a_broker_that_opens_no_channel_takes_nothing_until_it_does(peer: Peer, transport: Transport) -> None:
    peer.replies[Channel.Open] = lambda _: Channel.Close(504, "CHANNEL_ERROR", 20, 10)
    with pytest.raises(TransportUnavailable):
        await transport.publish(messages(1))
    assert not peer.has_published
    del peer.replies[Channel.Open]
    await publish_until_confirmed(transport, peer, messages(1))
