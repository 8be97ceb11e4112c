"""ReceivingCases: messages from outside, stored in a queue once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import Message
from outbox.core.store import Reception, Seal, Store
from outbox.testing.store.cases import (
    MakeStore,
    StoreCases,
    claimed,
    emit,
    message,
    settled,
    soon,
    write,
)

UNSTORABLE = "lone surrogate: \ud800"  # no database keeps text that has no UTF-8


class ReceivingCases(StoreCases):
    """Messages from outside, stored in a queue once."""

    # Many at once.

    async def test_a_received_message_lies_unchanged_in_its_queue_and_in_no_other(self, store: Store) -> None:
        until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
        sent = message(
            "order.created", b"\x00\xff", headers={"h": "v"}, key="k", tracking_ids=("x", "y"), expires_at=until
        )
        receipt = await store.queues.receive("q", [sent])
        assert receipt.stored == {sent.id}
        assert not receipt.refused
        [attempt] = await claimed(store)
        assert (attempt.message, attempt.attempt_count, attempt.crash_count) == (sent, 1, 0)
        assert await claimed(store, destination="other") == []

    async def test_bodies_of_every_size_are_received_unchanged(self, store: Store) -> None:
        large = [message(body=bytes([number]) * 1024 * 1024) for number in range(5)]
        messages = [message(body=b""), message(body=bytes(range(256))), *large]
        assert len((await store.queues.receive("q", messages[:2])).stored) == 2
        assert len((await store.queues.receive("q", messages)).stored) == 5
        assert {each.message.id: each.message for each in await claimed(store)} == {each.id: each for each in messages}

    async def test_messages_are_claimed_in_the_order_in_which_they_were_received(self, store: Store) -> None:
        messages = [message(tracking_ids=(f"{7919 * number % 20:02}",)) for number in range(20)]
        for start in range(0, 20, 5):
            await store.queues.receive("q", messages[start : start + 5])
        assert [each.message.id for each in await claimed(store, 10)] == [each.id for each in messages[:10]]

    async def test_a_received_message_is_never_taken_by_a_relay(self, engine: AsyncEngine, store: Store) -> None:
        ours = message()
        await emit(engine, store, ours)
        await store.queues.receive("q", [message(), message()])
        assert [attempt.message.id for attempt in await claimed(store, destination=None)] == [ours.id]
        await store.queues.bind([Binding("other", "#")])
        assert dict((await store.queues.route(100, {})).routed) == {"other": 1}
        assert len(await claimed(store)) == 2

    async def test_a_message_is_received_once_for_each_queue(self, store: Store) -> None:
        first, second = message(), message()
        assert (await store.queues.receive("q", [first])).stored == {first.id}
        assert (await store.queues.receive("q", [first, second])).stored == {second.id}
        assert (await store.queues.receive("other", [first])).stored == {first.id}
        assert [attempt.message.id for attempt in await claimed(store)] == [first.id, second.id]

    async def test_copies_in_one_batch_are_stored_once(self, store: Store) -> None:
        sent = message()
        assert (await store.queues.receive("q", [sent, sent, sent])).stored == {sent.id}
        assert len(await claimed(store)) == 1

    async def test_a_message_that_was_handled_is_not_received_again(self, store: Store) -> None:
        sent = message()
        await store.queues.receive("q", [sent])
        await settled(store, Done())
        assert not (await store.queues.receive("q", [sent])).stored
        assert await store.inspection.find(sent.id) == []

    async def test_a_message_that_is_dead_is_not_received_again_and_can_be_replayed(self, store: Store) -> None:
        sent = message()
        await store.queues.receive("q", [sent])
        await settled(store, Dead(Reason.REJECTED, "no"))
        assert not (await store.queues.receive("q", [sent])).stored
        [letter] = await store.dead_letters.list(queue="q")
        assert await store.dead_letters.replay([letter.id]) == 1
        assert [attempt.message for attempt in await claimed(store)] == [sent]

    async def test_what_the_inbox_remembers_is_not_received(self, engine: AsyncEngine, store: Store) -> None:
        sent = message()
        async with engine.begin() as connection:
            assert await write(connection, store, *store.inbox.remember("q", sent.id)) == 1
        assert not (await store.queues.receive("q", [sent])).stored
        assert await claimed(store) == []

    async def test_what_was_received_is_remembered_by_the_inbox(self, engine: AsyncEngine, store: Store) -> None:
        sent = message()
        await store.queues.receive("q", [sent])
        async with engine.begin() as connection:
            assert await write(connection, store, *store.inbox.remember("q", sent.id)) == 0

    async def test_many_receivers_of_the_same_messages_store_each_once(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].open()
        messages = [message(body=str(n).encode()) for n in range(100)]
        batches = [messages, messages[::-1], messages[50:] + messages[:50], messages]
        receipts = await asyncio.gather(
            *(each.queues.receive("q", batch) for each, batch in zip(stores, batches, strict=True))
        )
        assert sum(len(receipt.stored) for receipt in receipts) == 100
        assert len(await claimed(stores[0], 1000)) == 100

    @pytest.mark.parametrize("position", [0, 3, 6])
    async def test_a_message_that_cannot_be_stored_does_not_block_its_batch(self, store: Store, position: int) -> None:
        messages = [message(body=str(n).encode()) for n in range(7)]
        messages[position] = message(UNSTORABLE)
        good = {each.id for each in messages if each.routing_key != UNSTORABLE}
        receipt = await store.queues.receive("q", messages)
        assert receipt.stored == good
        assert set(receipt.refused) == {messages[position].id}
        lying = [attempt.message.id for attempt in await claimed(store)]
        assert (len(lying), set(lying)) == (len(good), good)

    async def test_a_message_whose_headers_are_no_text_fails_alone(self, store: Store) -> None:
        good, bad = message(), message(headers={"h": object()})
        receipt = await store.queues.receive("q", [bad, good])
        assert (receipt.stored, set(receipt.refused)) == (frozenset({good.id}), {bad.id})

    async def test_a_message_that_cannot_be_stored_leaves_no_entry(self, store: Store) -> None:
        bad = message(UNSTORABLE)
        for _ in range(2):
            receipt = await store.queues.receive("q", [bad])
            assert (receipt.stored, set(receipt.refused)) == (frozenset(), {bad.id})
        mended = message(tracking_ids=(bad.id,))
        assert (await store.queues.receive("q", [mended])).stored == {bad.id}

    async def test_receiving_nothing_writes_nothing(self, store: Store) -> None:
        assert not (await store.queues.receive("q", [])).stored
        assert await store.inspection.list_messages() == []

    async def test_a_received_message_is_seen_in_the_backlog_of_its_queue(self, store: Store) -> None:
        await store.queues.receive("q", [message(), message()])
        await settled(store, RetryIn(timedelta(hours=1), "later"))
        backlog = await store.inspection.backlog()
        assert (backlog.waiting, backlog.due) == (0, 0)
        [queue] = backlog.queues
        assert (queue.queue, queue.queued, queue.retrying) == ("q", 1, 1)

    async def test_a_received_message_whose_worker_died_is_a_suspect(self, store: Store) -> None:
        await store.queues.receive("q", [message()])
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            [attempt] = await soon(lambda: claimed(store))
        assert (attempt.attempt_count, attempt.crash_count) == (1, 1)

    async def test_a_sleeper_is_woken_by_what_is_received(self, store: Store) -> None:
        sleeping = asyncio.create_task(store.feed.wait(3600, destination="q"))
        await asyncio.sleep(0.1)

        async def woken() -> bool:
            await store.queues.receive("q", [message()])  # it may not have fallen asleep the first time
            return sleeping.done()

        await soon(woken)

    # Requests that are known.

    async def test_a_request_that_is_read_as_before_stores_what_is_new(self, store: Store) -> None:
        first, second, seal = message(), message(), Seal(("mark",), "as before")
        assert (await store.queues.receive("q", [first], seals=[seal])).stored == {first.id}
        again = await store.queues.receive("q", [first, second], seals=[seal])
        assert again.stored == {second.id}
        assert not again.broken
        assert (await store.queues.receive("other", [first], seals=[seal])).stored == {first.id}

    async def test_a_request_that_was_read_in_another_way_before_stores_nothing(self, store: Store) -> None:
        sent, seal, other = message(), Seal(("mark",), "as before"), Seal(("mark",), "otherwise")
        assert (await store.queues.receive("q", [sent], seals=[seal])).stored == {sent.id}
        for queue in ("q", "other", "q"):
            receipt = await store.queues.receive(queue, [message()], seals=[Seal(("another",), "x"), other])
            assert receipt.broken == {other}
            assert not receipt.stored
        assert len(await claimed(store)) == 1
        assert await claimed(store, destination="other") == []
        assert (await store.queues.receive("other", [sent], seals=[seal])).stored == {sent.id}, (
            "what failed left nothing"
        )

    async def test_any_mark_of_a_request_makes_it_known(self, store: Store) -> None:
        await store.queues.receive("q", [message()], seals=[Seal(("a", "b"), "as before")])
        for marks in (("a",), ("b",), ("c", "b")):
            other = Seal(marks, "otherwise")
            assert (await store.queues.receive("q", [message()], seals=[other])).broken == {other}

    async def test_of_two_readings_of_one_request_the_first_counts(self, store: Store) -> None:
        first, second = Seal(("mark",), "one"), Seal(("mark",), "other")
        assert (await store.queues.receive("q", [message()], seals=[first, second])).broken == {second}
        assert len((await store.queues.receive("q", [message()], seals=[first])).stored) == 1

    async def test_of_many_readings_at_once_one_is_stored(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].open()
        receiving = [
            each.queues.receive(f"q{number}", [message()], seals=[Seal(("mark",), str(number))])
            for number, each in enumerate(stores)
        ]
        receipts = await asyncio.gather(*receiving)
        assert sorted(len(receipt.stored) for receipt in receipts) == [0, 0, 0, 1]
        assert sum(len(receipt.broken) for receipt in receipts) == 3

    # One, in the caller's transaction.

    async def test_a_reception_commits_with_the_callers_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        sent = message("order.created", b"\x00", headers={"h": "v"}, key="k", tracking_ids=("x", "y"))
        async with engine.begin() as connection:
            assert await _received(connection, store, "q", sent) == ["enter", "place_if_bound"]
        [attempt] = await claimed(store)
        assert attempt.message == sent
        async with engine.begin() as connection:
            assert await _received(connection, store, "q", sent) == []

    async def test_a_reception_rolls_back_with_the_callers_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        sent = message()
        async with engine.connect() as connection:
            await _received(connection, store, "q", sent)
            await connection.rollback()
        assert await claimed(store) == []
        async with engine.begin() as connection:
            assert await _received(connection, store, "q", sent) == ["enter", "place_if_bound"]

    async def test_a_message_for_a_queue_that_nothing_is_bound_to_is_a_dead_letter(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "#")])
        sent = message(headers={"h": "v"}, key="k", tracking_ids=("x", "y"))
        async with engine.begin() as connection:
            assert await _received(connection, store, "lonely", sent) == ["enter", "bury"]
        assert await store.inspection.list_messages() == []
        [letter] = await store.dead_letters.list()
        assert (letter.queue, letter.reason, letter.message) == ("lonely", Reason.UNWANTED, sent)
        assert "lonely" in letter.error
        assert letter.error in letter.history
        assert (letter.attempt_count, letter.crash_count) == (0, 0)
        await store.dead_letters.replay([letter.id])
        assert [attempt.message for attempt in await claimed(store, destination="lonely")] == [sent]

    async def test_a_message_can_wait_in_a_queue_that_nothing_is_bound_to(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        sent = message()
        async with engine.begin() as connection:
            reception = store.writing.reception("lonely", sent)
            assert await write(connection, store, *reception.enter) == 1
            assert await write(connection, store, *reception.place) == 1
        assert [attempt.message for attempt in await claimed(store, destination="lonely")] == [sent]


async def _received(connection: AsyncConnection, store: Store, queue: str, sent: Message) -> list[str]:
    """Receive a message as a caller does; the statements that wrote something."""
    reception: Reception = store.writing.reception(queue, sent)
    if not await write(connection, store, *reception.enter):
        return []
    if await write(connection, store, *reception.place_if_bound):
        return ["enter", "place_if_bound"]
    assert await write(connection, store, *reception.bury(Reason.UNWANTED, f"no listener has {queue}")) == 1
    return ["enter", "bury"]
