"""PublishingContract: what every transport must do that publishes and delivers nothing. Inherit it for a new one:

class TestMyTransport(PublishingContract):
    @pytest.fixture
    async def destination(self): ...   # a Destination that nothing was sent to
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import pytest

from outbox.core.durations import LATEST, OLDEST
from outbox.core.errors import ConfigurationError
from outbox.core.message import Message
from outbox.core.transport import Published, Transport
from outbox.testing.transport.cases import SOON, check_declared_features, listener, message, skip_where

REFUSED = "order.refused"  # routing keys that a destination treats badly
IGNORED = "order.ignored"


AT_THE_LIMITS: dict[str, dict[str, Any]] = {
    "no body": {"body": b""},
    "all bytes": {"body": bytes(range(256)), "content_type": "application/octet-stream"},
    "no JSON": {"body": b"{" * 1000},
    "a large body": {"body": b"x" * 1024 * 1024, "content_type": "text/plain"},
    "a routing key": {"routing_key": "größe.😀 %"},
    "a key": {"key": 'a "key" 100%'},
    "a header": {"headers": {"a.b-c_D": "ü"}},
    "tracking ids": {"tracking_ids": ("a", "b.c, d")},
    "times": {"created_at": OLDEST, "expires_at": LATEST - timedelta(microseconds=1)},
    "a time when it was due": {"due_at": datetime(2026, 1, 1, tzinfo=UTC)},
}


class Destination(Protocol):
    """The other side of a transport, as a test of it needs it."""

    def transport(self) -> Transport:
        """A transport to it, not open yet."""
        ...

    @property
    def taken(self) -> list[str]:
        """The ids of the messages that it has for sure, in the order in which they came."""
        ...

    async def until_ignored(self) -> None:
        """Wait until a message with the routing key IGNORED has come: it gets no answer. REFUSED ones get a no."""
        ...


@pytest.mark.asyncio
class PublishingContract:
    """Confirmed is what has arrived, refused what was answered with no, and the rest is in doubt."""

    @pytest.fixture
    async def transport(self, destination: Destination) -> AsyncIterator[Transport]:
        transport = destination.transport()
        await transport.open()
        yield transport
        await transport.close()

    async def test_it_has_a_name_of_one_word(self, transport: Transport) -> None:
        assert transport.name.isidentifier()

    async def test_its_features_say_what_it_can_do(self, transport: Transport) -> None:
        check_declared_features(transport)

    async def test_what_is_confirmed_has_arrived(self, transport: Transport, destination: Destination) -> None:
        sent = [message(body=str(number).encode()) for number in range(100)]
        published = await transport.publish(sent)
        assert published.confirmed == {each.id for each in sent}
        assert dict(published.refused) == {}
        assert sorted(destination.taken) == sorted(published.confirmed)

    async def test_publishing_nothing_is_harmless(self, transport: Transport, destination: Destination) -> None:
        published = await transport.publish([])
        assert (published.confirmed, dict(published.refused), destination.taken) == (frozenset(), {}, [])

    async def test_a_refused_message_holds_up_no_other(self, transport: Transport, destination: Destination) -> None:
        sent = [message(), message(REFUSED), message()]
        published = await transport.publish(sent)
        assert published.confirmed == {sent[0].id, sent[2].id} == set(destination.taken)
        assert set(published.refused) == {sent[1].id}
        assert published.refused[sent[1].id].error

    async def test_what_got_no_answer_is_not_confirmed(self, transport: Transport, destination: Destination) -> None:
        ignored, other = message(IGNORED), message()
        async with asyncio.timeout(SOON):
            published = await transport.publish([ignored, other])
        assert ignored.id not in published.confirmed
        assert other.id in published.confirmed
        assert destination.taken == [other.id]

    async def test_what_is_answered_is_reported_before_the_rest_is_given_up(
        self, transport: Transport, destination: Destination
    ) -> None:
        skip_where(transport, "reports_answers", False, "it tells all answers at once")
        sent = [message(IGNORED), message(), message(REFUSED)]
        told: asyncio.Queue[Published] = asyncio.Queue()
        publishing = asyncio.create_task(transport.publish(sent, told.put_nowait))
        async with asyncio.timeout(SOON):
            first, second = await told.get(), await told.get()
            assert not publishing.done()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
        assert first.confirmed | second.confirmed == {sent[1].id}
        assert {*first.refused, *second.refused} == {sent[2].id}

    async def test_whoever_is_cancelled_ends_at_once(self, transport: Transport, destination: Destination) -> None:
        publishing = asyncio.create_task(transport.publish([message(IGNORED)]))
        async with asyncio.timeout(SOON):
            await destination.until_ignored()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
        assert (await transport.publish([message()])).confirmed

    async def test_several_batches_go_side_by_side(self, transport: Transport, destination: Destination) -> None:
        batches = [[message() for _ in range(20)] for _ in range(4)]
        found = await asyncio.gather(*(transport.publish(batch) for batch in batches))
        for batch, published in zip(batches, found, strict=True):
            assert published.confirmed == {each.id for each in batch}
        assert len(destination.taken) == 80

    async def test_the_same_message_may_be_published_again(
        self, transport: Transport, destination: Destination
    ) -> None:
        sent = message()
        for _ in range(2):
            assert (await transport.publish([sent])).confirmed == {sent.id}
        assert destination.taken == [sent.id, sent.id]

    @pytest.mark.parametrize("fields", AT_THE_LIMITS.values(), ids=AT_THE_LIMITS)
    async def test_a_message_at_the_limits_is_taken(
        self, transport: Transport, destination: Destination, fields: dict[str, Any]
    ) -> None:
        sent = Message(**{"routing_key": "order.created", "body": b"{}", **fields})
        assert (await transport.publish([sent])).confirmed == {sent.id}
        assert destination.taken == [sent.id]

    async def test_one_that_is_opened_twice_is_open_until_it_is_closed_twice(self, destination: Destination) -> None:
        transport = destination.transport()
        await transport.open()
        await transport.open()
        await transport.close()
        assert (await transport.publish([message()])).confirmed
        await transport.close()
        await transport.open()
        assert (await transport.publish([message()])).confirmed
        await transport.close()

    async def test_it_says_that_it_delivers_nothing(self, transport: Transport) -> None:
        assert not transport.features.consumes
        assert not transport.features.keeps_dead_letters
        assert transport.dead_letters is None
        with pytest.raises(ConfigurationError):
            await transport.declare([listener()])
        with pytest.raises(ConfigurationError):
            transport.consume(listener(), 1)
