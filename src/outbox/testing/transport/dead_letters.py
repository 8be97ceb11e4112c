"""TransportDeadLetterCases: dead letters, replays and what has expired."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from outbox.core.attempt import Dead, Done, Reason
from outbox.core.dead_letter import FIRST_OF_QUEUES
from outbox.core.errors import NotFound
from outbox.core.message import Message
from outbox.core.transport import Consumer, Delivery, Transport
from outbox.testing.transport.cases import (
    SOON,
    TransportCases,
    consuming,
    dead_letters_of,
    emptied,
    listener,
    message,
    skip_where,
    take,
)

COMPLETES = "its deliveries end with the listener's work, however old their messages are"
LONG_AGO = datetime(2001, 2, 3, 4, 5, 6, 789000, tzinfo=UTC)


class TransportDeadLetterCases(TransportCases):
    """Dead letters, replays and what has expired."""

    async def _dead(self, transport: Transport, *messages: Message, reason: Reason = Reason.REJECTED) -> None:
        await transport.publish(messages)
        async with consuming(transport) as deliveries:
            for delivery in await take(deliveries, len(messages)):
                await delivery.settle(Dead(reason, f"error of {delivery.attempt.message.id}"))

    async def test_a_dead_message_is_kept_unchanged_with_its_reason(self, transport: Transport) -> None:
        letters = dead_letters_of(transport)
        await transport.declare([listener()])
        sent = message("order.created", b"\x00\xff", headers={"a": "b"}, key="k", tracking_ids=("x", "y"))
        await self._dead(transport, sent)
        [letter] = await letters.list(queue="q")
        assert letter.message == sent
        assert (letter.queue, letter.reason, letter.error) == ("q", Reason.REJECTED, "error of y")
        assert letter.attempt_count == 1
        assert letter.id >= FIRST_OF_QUEUES or transport.features.in_store  # smaller ones are a store's
        assert await emptied(transport, count=0) == []

    async def test_dead_letters_are_found_shown_and_discarded(self, transport: Transport) -> None:
        letters = dead_letters_of(transport)
        await transport.declare([listener()])
        await self._dead(transport, message(), message())
        await self._dead(transport, message(), reason=Reason.EXHAUSTED)
        first, second, third = await letters.list()
        assert await letters.list(reason=Reason.EXHAUSTED) == [third]
        assert await letters.list(error=first.message.id) == [first]
        assert await letters.list(queue="other") == []
        assert await letters.list(limit=1, after=first.id) == [second]
        assert await letters.list(routing_key=first.message.routing_key) == [first, second, third]
        assert await letters.list(routing_key="order") == []
        assert third in await letters.list(since=third.died_at)
        assert await letters.list(before=first.died_at) == []
        assert await letters.show(second.id) == second
        assert await letters.discard([first.id, third.id, third.id]) == 2
        assert await letters.list() == [second]
        with pytest.raises(NotFound):
            await letters.show(first.id)

    async def test_a_replayed_message_comes_back_to_its_queue_with_fresh_attempts(self, transport: Transport) -> None:
        letters = dead_letters_of(transport)
        await transport.declare([listener(), listener("other")])
        sent = message(expires_at=datetime.now(UTC) + timedelta(hours=1))
        await self._dead(transport, sent)
        await emptied(transport, "other")
        [letter] = await letters.list()
        assert await letters.replay([letter.id]) == 1
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert delivery.attempt.message == replace(sent, expires_at=None), "what is replayed expires no more"
            assert delivery.attempt.attempt_count == 1
            await delivery.settle(Done())
        assert await emptied(transport, "other", 0) == []
        assert await letters.list() == []

    async def test_it_travels_when_a_message_was_due(self, transport: Transport) -> None:
        skip_where(transport, "completes_in_transaction", True, COMPLETES)
        await transport.declare([listener()])
        await transport.publish([message(due_at=LONG_AGO), message(body=b"at once")])
        found = {each.body: each.due_at for each in await emptied(transport, count=2)}
        assert found == {b"{}": LONG_AGO, b"at once": None}

    async def test_a_replay_is_due_anew(self, transport: Transport) -> None:
        skip_where(transport, "completes_in_transaction", True, COMPLETES)
        letters = dead_letters_of(transport)
        await transport.declare([listener()])
        sent = message(due_at=LONG_AGO)
        await self._dead(transport, sent)
        [letter] = await letters.list()
        await letters.replay([letter.id])
        [again] = await emptied(transport)
        assert again == sent
        assert again.due_at is not None
        assert again.due_at > datetime.now(UTC) - timedelta(hours=1)

    async def test_what_is_at_hand_can_be_had_without_waiting(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message(body=str(number).encode()) for number in range(5)])
        async with consuming(transport) as deliveries:
            if type(deliveries).take is Consumer.take:
                pytest.skip("no Consumer.take(): its deliveries can only be waited for")
            found: list[Delivery] = []
            while len(found) < 5:
                found += await take(deliveries)
                while (delivery := deliveries.take()) is not None:
                    found.append(delivery)
            assert {delivery.attempt.message.body for delivery in found} == {b"0", b"1", b"2", b"3", b"4"}
            for delivery in found:
                await delivery.settle(Done())
            assert deliveries.take() is None

    async def test_an_expired_message_is_not_delivered(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message(expires_at=datetime.now(UTC) - timedelta(seconds=1)), message(body=b"fresh")])
        assert [found.body for found in await emptied(transport)] == [b"fresh"]

    async def test_an_expired_message_is_a_dead_letter(self, transport: Transport) -> None:
        letters = dead_letters_of(transport)
        await transport.declare([listener()])
        await transport.publish([message(expires_at=datetime.now(UTC) - timedelta(seconds=1))])
        assert await emptied(transport, count=0) == []
        async with asyncio.timeout(SOON):  # a broker may move it there by itself
            while not (found := await letters.list()):
                await asyncio.sleep(0.05)
        assert [letter.reason for letter in found] == [Reason.EXPIRED]
