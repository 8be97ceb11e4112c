"""TransportContract: what every transport must do. Inherit it for a new broker:

    class TestMyTransport(TransportContract):
        @pytest.fixture
        async def make_transport(self): ...   # make_transport() -> Transport, all on the same broker, nothing in it

What a transport declares in its `features` that it cannot do is not asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.core.attempt import Dead, Done, Reason, Released, RetryIn
from outbox.core.dead_letter import FIRST_OF_QUEUES
from outbox.core.errors import NotFound
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import AtHand, Delivery, Transport
from outbox.transports.database import DatabaseTransport

SOON = 30.0  # seconds within which everything must have come, on the slowest machine
QUIET = 0.3  # seconds in which nothing may come

MakeTransport = Callable[[], Transport]


async def nothing(body: object) -> None:
    """A callback: the contract takes deliveries by itself."""


def listener(queue: str = "q", binding_key: str = "#", **options: Any) -> Listener:
    return Listener(binding_key, nothing, queue=queue, **options)


def message(routing_key: str = "order.created", body: bytes = b"{}", **fields: Any) -> Message:
    return Message(routing_key=routing_key, body=body, **fields)


@asynccontextmanager
async def consuming(
    transport: Transport, queue: str = "q", prefetch: int = 10
) -> AsyncIterator[AsyncIterator[Delivery]]:
    """The deliveries of a queue, closed at the end."""
    deliveries = transport.consume(listener(queue), prefetch)
    try:
        yield deliveries
    finally:
        await deliveries.aclose()  # type: ignore[attr-defined]


async def take(deliveries: AsyncIterator[Delivery], count: int = 1) -> list[Delivery]:
    """The next deliveries."""
    async with asyncio.timeout(SOON):
        return [await anext(deliveries) for _ in range(count)]


async def quiet(deliveries: AsyncIterator[Delivery]) -> bool:
    """Whether nothing comes for a while."""
    try:
        async with asyncio.timeout(QUIET):
            await anext(deliveries)
    except TimeoutError:
        return True
    return False


async def emptied(transport: Transport, queue: str = "q", count: int = 1) -> list[Message]:
    """The messages of a queue that holds so many and no more, settled as done."""
    async with consuming(transport, queue, 100) as deliveries:
        found = await take(deliveries, count)
        for delivery in found:
            await delivery.settle(Done())
        assert await quiet(deliveries), f"{queue} holds more than {count}"
        return [delivery.attempt.message for delivery in found]


@pytest.mark.asyncio
class TransportContract:
    """Publishing, delivering, and every outcome."""

    @pytest.fixture
    async def transport(self, make_transport: MakeTransport) -> AsyncIterator[Transport]:
        transport = make_transport()
        await transport.open()
        yield transport
        await transport.close()

    # Publishing.

    async def test_it_has_a_name_of_one_word(self, transport: Transport) -> None:
        assert transport.name.isidentifier()

    async def test_a_message_for_a_bound_queue_is_confirmed_and_delivered_unchanged(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = message(
            "order.created",
            bytes(range(256)),
            content_type="application/x-thing",
            headers={"trace": "abc"},
            key="customer-1",
            tracking_ids=("first", "second"),
        )
        published = await transport.publish([sent])
        assert (published.confirmed, dict(published.refused)) == (frozenset({sent.id}), {})
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert delivery.attempt.message == sent
            assert (delivery.attempt.attempt_count, delivery.attempt.crash_count) == (1, 0)
            assert await delivery.settle(Done()) is True

    async def test_a_message_that_no_queue_is_bound_to_is_never_confirmed(self, transport: Transport) -> None:
        await transport.declare([listener(binding_key="order.*")])
        bound, unbound = message("order.created"), message("user.created")
        published = await transport.publish([unbound, bound])
        assert published.confirmed == {bound.id}
        assert set(published.refused) == {unbound.id}
        assert not published.refused[unbound.id].permanent
        assert [found.id for found in await emptied(transport)] == [bound.id]

    async def test_publishing_nothing_is_harmless(self, transport: Transport) -> None:
        published = await transport.publish([])
        assert (published.confirmed, dict(published.refused)) == (frozenset(), {})

    async def test_a_message_goes_to_every_queue_that_asks_for_it(self, transport: Transport) -> None:
        await transport.declare([listener("a", "order.*"), listener("b", "#"), listener("c", "user.#")])
        sent = message("order.created")
        await transport.publish([sent])
        assert [found.id for found in await emptied(transport, "a")] == [sent.id]
        assert [found.id for found in await emptied(transport, "b")] == [sent.id]
        assert await emptied(transport, "c", 0) == []

    async def test_declaring_again_changes_nothing(self, transport: Transport) -> None:
        for _ in range(3):
            await transport.declare([listener("a"), listener("b", "x")])
        await transport.publish([message()])
        assert len(await emptied(transport, "a")) == 1

    async def test_many_messages_all_arrive(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = [message(body=str(n).encode()) for n in range(300)]
        assert len((await transport.publish(sent)).confirmed) == 300
        async with consuming(transport, prefetch=50) as deliveries:
            bodies = set()
            for _ in sent:
                [delivery] = await take(deliveries)
                bodies.add(delivery.attempt.message.body)
                delivery.settle(Done())
        assert len(bodies) == 300

    # Delivering.

    async def test_no_more_than_prefetch_messages_are_out_at_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(5)])
        async with consuming(transport, prefetch=2) as deliveries:
            first, second = await take(deliveries, 2)
            assert await quiet(deliveries)
            await first.settle(Done())
            [third] = await take(deliveries)
            for delivery in (second, third):
                await delivery.settle(Done())

    async def test_two_consumers_share_a_queue(self, make_transport: MakeTransport) -> None:
        transports = [make_transport(), make_transport()]
        for transport in transports:
            await transport.open()
        await transports[0].declare([listener()])
        await transports[0].publish([message(body=str(n).encode()) for n in range(40)])
        seen: list[bytes] = []
        everything = asyncio.Event()

        async def serve(transport: Transport) -> None:
            async with consuming(transport, prefetch=4) as deliveries:
                async for delivery in deliveries:
                    seen.append(delivery.attempt.message.body)
                    await delivery.settle(Done())
                    if len(seen) == 40:
                        everything.set()

        tasks = [asyncio.create_task(serve(transport)) for transport in transports]
        async with asyncio.timeout(SOON):
            await everything.wait()
        await asyncio.sleep(QUIET)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(seen) == sorted(str(n).encode() for n in range(40))
        for transport in transports:
            await transport.close()

    async def test_what_nobody_took_is_given_back_when_the_consumer_closes(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(5)])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            await delivery.settle(Done())
        async with consuming(transport) as deliveries:
            again = await take(deliveries, 4)
            assert [(d.attempt.attempt_count, d.attempt.crash_count) for d in again] == [(1, 0)] * 4
            for delivery in again:
                await delivery.settle(Done())

    async def test_a_consumer_that_is_cancelled_while_it_waits_loses_nothing(self, transport: Transport) -> None:
        await transport.declare([listener()])
        async with consuming(transport) as deliveries:
            for n in range(10):
                taking = asyncio.ensure_future(anext(deliveries))
                await asyncio.sleep(0)
                await transport.publish([message(body=str(n).encode())])
                for _ in range(n):
                    await asyncio.sleep(0)
                taking.cancel()
                [result] = await asyncio.gather(taking, return_exceptions=True)
                if isinstance(result, BaseException):
                    [result] = await take(deliveries)
                assert result.attempt.message.body == str(n).encode()
                await result.settle(Done())

    async def test_the_raw_message_is_there_for_listeners_that_ask(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert delivery.raw is not None
            assert (delivery.completion() is not None) == transport.features.completes_in_transaction
            await delivery.settle(Done())

    async def test_messages_stay_when_the_transport_closes_and_opens(self, make_transport: MakeTransport) -> None:
        transport = make_transport()
        await transport.open()
        await transport.declare([listener()])
        await transport.publish([message(), message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            delivery.settle(Done())
        await transport.close()
        await transport.open()
        assert len(await emptied(transport)) == 1
        await transport.close()

    async def test_outcomes_are_written_before_the_transport_closes(self, make_transport: MakeTransport) -> None:
        transport = make_transport()
        await transport.open()
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(10)])
        async with consuming(transport) as deliveries:
            landed = [delivery.settle(Done()) for delivery in await take(deliveries, 10)]
        await transport.close()
        assert [future.result() for future in landed] == [True] * 10
        await transport.open()
        assert await emptied(transport, count=0) == []
        await transport.close()

    # Outcomes.

    async def test_done_means_it_does_not_come_back(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert await delivery.settle(Done()) is True
            assert await quiet(deliveries)

    async def test_a_retry_comes_back_after_its_delay_with_the_next_attempt_count(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = message("order.created", headers={"a": "b"})
        await transport.publish([sent])
        loop = asyncio.get_running_loop()
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            began = loop.time()
            assert await delivery.settle(RetryIn(timedelta(milliseconds=400), "boom")) is True
            [again] = await take(deliveries)
            if transport.features.delays:
                assert loop.time() - began >= 0.399
            assert again.attempt.message == sent
            assert again.attempt.attempt_count == 2
            await again.settle(Done())

    async def test_a_retry_without_delay_comes_back_at_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            for expected in (1, 2, 3):
                [delivery] = await take(deliveries)
                assert delivery.attempt.attempt_count == expected
                await delivery.settle(RetryIn(timedelta(0), "boom") if expected < 3 else Done())

    async def test_a_retry_comes_back_only_to_the_queue_that_failed(self, transport: Transport) -> None:
        await transport.declare([listener("a"), listener("b")])
        await transport.publish([message()])
        async with consuming(transport, "a") as failing, consuming(transport, "b") as fine:
            [failed], [done] = await take(failing), await take(fine)
            await done.settle(Done())
            await failed.settle(RetryIn(timedelta(milliseconds=50), "boom"))
            [again] = await take(failing)
            assert again.attempt.attempt_count == 2
            await again.settle(Done())
            assert await quiet(fine)

    async def test_released_comes_back_at_once_and_burns_no_attempt(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            for _ in range(3):
                [delivery] = await take(deliveries)
                assert (delivery.attempt.attempt_count, delivery.attempt.crash_count) == (1, 0)
                await delivery.settle(Released())
            [delivery] = await take(deliveries)
            await delivery.settle(Done())

    async def test_settling_twice_counts_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            first = delivery.settle(Done())
            second = delivery.settle(RetryIn(timedelta(0), "no"))
            assert await first is True
            assert second.cancelled()
            assert await quiet(deliveries)

    # Dead letters.

    async def _dead(self, transport: Transport, *messages: Message, reason: Reason = Reason.REJECTED) -> None:
        await transport.publish(messages)
        async with consuming(transport) as deliveries:
            for delivery in await take(deliveries, len(messages)):
                await delivery.settle(Dead(reason, f"error of {delivery.attempt.message.id}"))

    async def test_a_dead_message_is_kept_unchanged_with_its_reason(self, transport: Transport) -> None:
        if transport.dead_letters is None:
            assert not transport.features.keeps_dead_letters
            return
        await transport.declare([listener()])
        sent = message("order.created", b"\x00\xff", headers={"a": "b"}, key="k", tracking_ids=("x", "y"))
        await self._dead(transport, sent)
        [letter] = await transport.dead_letters.list(queue="q")
        assert letter.message == sent
        assert (letter.queue, letter.reason, letter.error) == ("q", Reason.REJECTED, "error of y")
        assert letter.attempt_count == 1
        assert letter.id >= FIRST_OF_QUEUES or isinstance(transport, DatabaseTransport)  # smaller ones are a store's
        assert await emptied(transport, count=0) == []

    async def test_dead_letters_are_found_shown_and_discarded(self, transport: Transport) -> None:
        if transport.dead_letters is None:
            assert not transport.features.keeps_dead_letters
            return
        letters = transport.dead_letters
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
        if transport.dead_letters is None:
            assert not transport.features.keeps_dead_letters
            return
        await transport.declare([listener(), listener("other")])
        sent = message()
        await self._dead(transport, sent)
        await emptied(transport, "other")
        [letter] = await transport.dead_letters.list()
        assert await transport.dead_letters.replay([letter.id]) == 1
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert (delivery.attempt.message, delivery.attempt.attempt_count) == (sent, 1)
            await delivery.settle(Done())
        assert await emptied(transport, "other", 0) == []
        assert await transport.dead_letters.list() == []

    async def test_it_travels_when_a_message_was_due_and_a_replay_is_due_anew(self, transport: Transport) -> None:
        if transport.features.completes_in_transaction:
            return  # nobody asks how old a message is where its end is written with the listener's work
        await transport.declare([listener()])
        long_ago = datetime(2001, 2, 3, 4, 5, 6, 789000, tzinfo=UTC)
        sent = message(due_at=long_ago)
        await transport.publish([sent, message(body=b"at once")])
        async with consuming(transport) as deliveries:
            found = {delivery.attempt.message.body: delivery for delivery in await take(deliveries, 2)}
            assert found[b"at once"].attempt.message.due_at is None
            assert found[b"{}"].attempt.message.due_at == long_ago
            await found[b"at once"].settle(Done())
            await found[b"{}"].settle(Dead(Reason.REJECTED, "no"))
        if transport.dead_letters is None:
            return
        [letter] = await transport.dead_letters.list()
        await transport.dead_letters.replay([letter.id])
        [again] = await emptied(transport)
        assert again == sent
        assert again.due_at is not None
        assert again.due_at > datetime.now(UTC) - timedelta(hours=1)

    async def test_what_is_at_hand_can_be_had_without_waiting(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message(body=str(number).encode()) for number in range(5)])
        async with consuming(transport) as deliveries:
            if not isinstance(deliveries, AtHand):
                return
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
        if transport.dead_letters is not None:
            async with asyncio.timeout(SOON):  # a broker may move it there by itself
                while not (letters := await transport.dead_letters.list()):
                    await asyncio.sleep(0.05)
            assert [letter.reason for letter in letters] == [Reason.EXPIRED]
