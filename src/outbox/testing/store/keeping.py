"""KeepingCases: waiting, cleaning up, dead letters and looking."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.binding import Binding
from outbox.core.dead_letter import Deaths
from outbox.core.durations import NEVER
from outbox.core.errors import ConfigurationError, NotFound
from outbox.core.message import Schedule
from outbox.core.store import Selection, Store
from outbox.testing.store.cases import LEASE, SOON, MakeStore, StoreCases, claimed, emit, message, queued, settled, soon


class KeepingCases(StoreCases):
    """Waiting, cleaning up, dead letters and looking."""

    # Waiting.

    async def test_a_wait_ends_in_time_when_nothing_happens(self, store: Store) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(5):  # one or the other may end early: a wake-up is a hint
            await store.feed.wait(0.2, destination="q")
        assert 0.35 <= loop.time() - began < SOON

    async def test_an_announcement_ends_a_wait(self, store: Store) -> None:
        waiting = asyncio.create_task(store.feed.wait(60, destination="q"))
        async with asyncio.timeout(SOON):
            while not waiting.done():
                store.queues.announce("q")
                await asyncio.sleep(0.01)

    async def test_an_announcement_just_before_a_wait_is_not_missed(self, store: Store) -> None:
        await store.feed.wait(0.01, destination="q")
        store.queues.announce("q")
        async with asyncio.timeout(SOON):
            await store.feed.wait(60, destination="q")

    async def test_a_wait_ends_when_the_next_message_is_due(self, engine: AsyncEngine, store: Store) -> None:
        loop = asyncio.get_running_loop()
        for seconds in (1, 4):  # it must not be due before the wait begins, whatever holds the machine up
            began = loop.time()
            await emit(engine, store, message(), schedule=Schedule(due=timedelta(seconds=seconds)))
            if loop.time() - began < 0.3:
                break
        async with asyncio.timeout(SOON):
            await store.feed.wait(60)
            await soon(lambda: claimed(store, destination=None))

    async def test_a_wait_ends_when_another_process_has_work(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        """Two stores share nothing but the database, as two processes do."""
        if not self.wakes_other_processes:
            pytest.skip("wakes_other_processes=False: they find it when they look next")
        other = make_store()
        await emit(engine, other, message())  # tables and connections are warm
        await settled(other, Done(), None)
        waiting = asyncio.create_task(store.feed.wait(60))
        async with asyncio.timeout(SOON):
            while not waiting.done():
                await emit(engine, other, message())
                other.queues.announce(None)
                await asyncio.sleep(0.1)

    # Cleaning up.

    async def test_done_messages_are_purged_in_bounded_batches_when_they_are_old(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=timedelta(hours=1))
        await queued(engine, store, *(message() for _ in range(6)))
        async with store.feed.claim(Selection(limit=5, lease=LEASE, destination="q")) as claim:
            await claim.settle({attempt.id: Done() for attempt in claim.attempts})
        assert await store.maintenance.purge(timedelta(hours=1), 100) == 0
        await asyncio.sleep(0.01)
        assert [await store.maintenance.purge(timedelta(0), 3) for _ in range(3)] == [3, 2, 0]
        assert [stored.state for stored in await store.inspection.list_messages()] == ["queued"]

    # Tables.

    async def test_tables_that_are_missing_are_differences_and_those_just_made_are_none(
        self, make_store: MakeStore
    ) -> None:
        store = make_store()
        missing = await store.maintenance.check_tables()
        assert missing and all(difference.breaks and difference.mend for difference in missing)
        assert not await store.maintenance.has_tables()
        await store.maintenance.create_tables()
        assert await store.maintenance.check_tables() == []

    # Dead letters.

    async def _dead(self, engine: AsyncEngine, store: Store, count: int = 3) -> Sequence[int]:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(count)))
        reasons = list(Reason)
        async with store.feed.claim(Selection(limit=count, lease=LEASE, destination="q")) as claim:
            await claim.settle(
                {a.id: Dead(reasons[n % len(reasons)], f"error {n}") for n, a in enumerate(claim.attempts)}
            )
        return [letter.id for letter in await store.dead_letters.list(limit=count)]

    async def test_dead_letters_are_listed_by_queue_reason_and_error(self, engine: AsyncEngine, store: Store) -> None:
        ids = await self._dead(engine, store, 6)
        letters = store.dead_letters
        assert [letter.id for letter in await letters.list(queue="q")] == ids
        assert await letters.list(queue="other") == []
        assert [letter.error for letter in await letters.list(reason=Reason.REFUSED)] == ["error 2"]
        assert [letter.error for letter in await letters.list(error="ror 3")] == ["error 3"]
        assert await letters.list(error="%") == []
        assert [letter.id for letter in await letters.list(limit=2)] == ids[:2]
        assert [letter.id for letter in await letters.list(after=ids[3])] == ids[4:]

    async def test_dead_letters_are_listed_by_routing_key_and_by_when_they_died(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        [first] = await self._dead(engine, store, 1)
        await asyncio.sleep(0.005)  # a clock may tell no less than milliseconds
        await queued(engine, store, message("order.paid"))
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            await claim.settle({claim.attempts[0].id: Dead(Reason.REJECTED, "no")})
        letters = store.dead_letters
        earlier, later = await letters.list()
        assert earlier.id == first and await letters.list(routing_key="order.paid") == [later]
        assert await letters.list(routing_key="order.*") == []
        assert await letters.list(since=later.died_at) == [later]
        assert await letters.list(before=later.died_at) == [earlier]
        elsewhere = later.died_at.astimezone(timezone(timedelta(hours=5)))
        assert await letters.list(since=elsewhere, before=elsewhere + timedelta(seconds=1)) == [later]

    async def test_dead_letters_of_the_last_hour_are_counted_by_queue_and_reason(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await self._dead(engine, store, 3)
        hour = timedelta(hours=1)
        assert await store.dead_letters.deaths(hour) == [
            Deaths(queue="q", reason=reason, count=1) for reason in ("exhausted", "refused", "rejected")
        ]
        await asyncio.sleep(0.01)
        assert await store.dead_letters.deaths(timedelta(milliseconds=1)) == []

    async def test_looking_at_a_dead_letter_changes_nothing(self, engine: AsyncEngine, store: Store) -> None:
        [id] = await self._dead(engine, store, 1)
        first = await store.dead_letters.show(id)
        assert await store.dead_letters.show(id) == first
        assert await store.dead_letters.list() == [first]

    async def test_an_unknown_dead_letter_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound, match="12345"):
            await store.dead_letters.show(12345)
        assert await store.dead_letters.replay([12345]) == 0
        assert await store.dead_letters.discard([12345]) == 0
        assert await store.dead_letters.replay([]) == 0

    async def test_a_replayed_message_comes_back_only_to_the_queue_where_it_died(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("other", "#")])
        [id] = await self._dead(engine, store, 1)
        before = (await store.dead_letters.show(id)).message
        await settled(store, Done(), "other")
        assert await store.dead_letters.replay([id, id]) == 1
        [attempt] = await claimed(store)
        assert (attempt.message, attempt.attempt_count, attempt.crash_count) == (before, 1, 0)
        assert await claimed(store, destination="other") == []
        assert await store.dead_letters.list() == []

    async def test_a_replay_is_written_down_behind_what_led_to_it(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        await settled(store, RetryIn(timedelta(0), "ValueError: first"))
        await soon(lambda: claimed(store))
        await settled(store, Dead(Reason.EXHAUSTED, "ValueError: second\nand where"))
        [letter] = await store.dead_letters.list()
        await store.dead_letters.replay([letter.id])
        [stored] = await store.inspection.list_messages()
        failed, last, replayed = stored.history.splitlines()
        assert failed.endswith("attempt 1 failed: ValueError: first")
        assert last.endswith("attempt 2 was the last, exhausted: ValueError: second")
        assert "replayed" in replayed

    async def test_a_replayed_message_of_a_relay_waits_again(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message())
        await settled(store, Dead(Reason.REFUSED, "no"), None)
        [letter] = await store.dead_letters.list()
        assert letter.queue is None
        await store.dead_letters.replay([letter.id])
        assert len(await claimed(store, destination=None)) == 1

    async def test_a_replayed_message_does_not_expire_again(self, engine: AsyncEngine, store: Store) -> None:
        past = datetime.now(UTC) - timedelta(minutes=1)
        await queued(engine, store, message(), schedule=Schedule(due=past, expiration=timedelta(seconds=1)))
        assert await claimed(store) == []
        [letter] = await store.dead_letters.list()
        await store.dead_letters.replay([letter.id])
        assert len(await claimed(store)) == 1

    async def test_two_replays_at_once_bring_a_message_back_once(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        stores = [make_store() for _ in range(3)]
        ids = await self._dead(engine, stores[0], 6)
        counts = await asyncio.gather(*(store.dead_letters.replay(ids) for store in stores))
        assert sum(counts) == 6
        assert len(await claimed(stores[0])) == 6

    async def test_a_discarded_dead_letter_is_gone_for_good(self, engine: AsyncEngine, store: Store) -> None:
        first, second, third = await self._dead(engine, store)
        assert await store.dead_letters.discard([first, third]) == 2
        assert [letter.id for letter in await store.dead_letters.list()] == [second]
        assert await store.inspection.list_messages() == []

    # Looking.

    async def test_an_empty_store_has_an_empty_backlog(self, store: Store) -> None:
        backlog = await store.inspection.backlog()
        assert (backlog.waiting, backlog.due, backlog.leased, backlog.dead, backlog.oldest) == (0, 0, 0, 0, None)
        assert backlog.queues == ()

    async def test_the_backlog_counts_what_lies_where(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await store.queues.bind([Binding("q", "order.*"), Binding("empty", "never")])
        await emit(engine, store, *(message() for _ in range(4)), message("lonely"))
        await store.queues.route(100, {})
        await settled(store, Done())
        await settled(store, RetryIn(LEASE, "x"))
        await settled(store, Dead(Reason.REJECTED, "x"))
        await emit(engine, store, message())
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1)))
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            assert len(claim.attempts) == 1
            backlog = await store.inspection.backlog()
        assert (backlog.waiting, backlog.due, backlog.unroutable) == (2, 1, 1)
        assert (backlog.leased, backlog.sent, backlog.handled, backlog.dead) == (1, 0, 1, 1)
        assert backlog.oldest is not None
        assert backlog.oldest > timedelta(0)
        assert backlog.rows_written == 7
        empty, q = backlog.queues
        assert (empty.queue, empty.binding_keys, empty.queued) == ("empty", ("never",), 0)
        assert (q.queued, q.retrying, q.leased, q.dead) == (1, 1, 1, 1)

    async def test_messages_are_listed_by_state_and_queue(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await store.queues.bind([Binding("q", "order.*")])
        await emit(engine, store, message(body=b"handled"), message(body=b"retrying"), message(body=b"queued"))
        await emit(engine, store, message("lonely", body=b"unroutable"))
        await store.queues.route(100, {})
        async with store.feed.claim(Selection(limit=3, lease=LEASE, destination="q")) as claim:
            by_body = {attempt.message.body: attempt.id for attempt in claim.attempts}
            await claim.settle({by_body[b"handled"]: Done(), by_body[b"retrying"]: RetryIn(LEASE, "x")})
        await emit(engine, store, message(body=b"sent"))
        await settled(store, Done(), None)
        await emit(engine, store, message(body=b"waiting"))
        for state in ("waiting", "unroutable", "queued", "retrying", "sent", "handled"):
            [stored] = await store.inspection.list_messages(state=state)
            assert (stored.state, stored.message.body) == (state, state.encode())
        assert len(await store.inspection.list_messages(queue="q")) == 3
        everything = await store.inspection.list_messages()
        assert [
            stored.row_id for stored in await store.inspection.list_messages(limit=2, after=everything[0].row_id)
        ] == [stored.row_id for stored in everything[1:3]]
        with pytest.raises(ConfigurationError, match="no state"):
            await store.inspection.list_messages(state="lost")

    async def test_from_the_queue_of_a_route_messages_are_sent_and_from_others_handled(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=NEVER)
        await store.maintenance.record_transport("routes")
        await queued(engine, store, to_route := message())
        await store.queues.deliver([received := message()], {received.id: ["listener"]})
        await settled(store, Done(), "q")
        await settled(store, Done(), "listener")
        [stored] = await store.inspection.list_messages(state="sent")
        assert (stored.message.id, stored.queue, stored.state) == (to_route.id, "q", "sent")
        [stored] = await store.inspection.list_messages(state="handled")
        assert (stored.message.id, stored.queue, stored.state) == (received.id, "listener", "handled")
        assert [each.state for each in await store.inspection.find(to_route.id)] == ["sent"]
        backlog = await store.inspection.backlog()
        assert (backlog.sent, backlog.handled) == (1, 1)

    async def test_a_message_is_found_wherever_it_is(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("a", "#"), Binding("b", "#")])
        sent = message()
        await emit(engine, store, sent)
        [stored] = await store.inspection.find(sent.id)
        assert (stored.state, stored.queue, stored.routed_at) == ("waiting", None, None)
        await store.queues.route(100, {})
        await settled(store, Dead(Reason.REJECTED, "no"), "a")
        waits, dead = await store.inspection.find(sent.id)
        assert (waits.state, waits.queue, dead.state, dead.queue) == ("queued", "b", "dead", "a")
        assert (dead.reason, dead.error) == ("rejected", "no")
        assert waits.routed_at is not None
        assert await store.inspection.find("unknown") == []

    async def test_a_message_that_moves_is_found_in_one_place(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, sent := message())
        moving = asyncio.create_task(_back_and_forth(store, 50))
        while not moving.done():
            assert len(await store.inspection.find(sent.id)) == 1
            backlog = await store.inspection.backlog()
            [queue] = backlog.queues
            assert queue.open + (queue.dead or 0) == 1
            assert backlog.dead == queue.dead == sum(backlog.dead_by_reason.values())
        await moving

    async def test_a_lease_is_shown_while_it_holds(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")):
            [stored] = await store.inspection.list_messages()
            assert stored.leased_until is not None
            assert stored.crash_count == 0
        [stored] = await store.inspection.list_messages()
        assert stored.leased_until is None


async def _back_and_forth(store: Store, times: int) -> None:
    """A message dies and is replayed, again and again."""
    for _ in range(times):
        await settled(store, Dead(Reason.REJECTED, "no"))
        [letter] = await store.dead_letters.list()
        await store.dead_letters.replay([letter.id])
