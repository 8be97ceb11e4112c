"""EmittingCases: what a caller's transaction writes, and when it is due."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Done, Reason
from outbox.core.binding import Binding
from outbox.core.durations import EARLIEST, NEVER
from outbox.core.message import NOW, Schedule
from outbox.core.store import Selection, Store
from outbox.testing.store.cases import (
    LEASE,
    MakeStore,
    StoreCases,
    claimed,
    claimed_before_it_expires,
    emit,
    message,
    queued,
    settled,
    soon,
    write,
)


class EmittingCases(StoreCases):
    """What a caller's transaction writes, and when it is due."""

    # Tables.

    async def test_tables_can_be_made_again_and_again(self, store: Store) -> None:
        await store.maintenance.create_tables()
        await store.maintenance.create_tables()

    async def test_tables_can_be_made_by_many_at_once(self, make_store: MakeStore) -> None:
        await asyncio.gather(*(make_store().maintenance.create_tables() for _ in range(5)))

    async def test_whether_the_tables_are_there_is_told_without_making_them(self, make_store: MakeStore) -> None:
        store = make_store()
        assert not await store.maintenance.has_tables()
        assert not await make_store().maintenance.has_tables()
        await store.maintenance.create_tables()
        assert await store.maintenance.has_tables()

    async def test_the_first_write_makes_the_tables(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store()
        assert await emit(engine, store, message()) == 1
        assert len(await claimed(store, destination=None)) == 1

    async def test_the_first_write_makes_the_tables_even_if_it_rolls_back(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store()
        async with engine.connect() as connection:
            for _ in range(2):  # the second one finds tables that may be gone with this transaction
                await write(connection, store, *store.writing.insert([message()], NOW))
            await connection.rollback()
        await emit(engine, store, message(body=b"kept"))
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"kept"]

    # Emitting.

    async def test_whether_a_transaction_keeps_anything_after_a_swallowed_error_is_known_before_its_commit(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        """Otherwise it would count as committed where its database rolls it back instead, without an error."""
        async with engine.connect() as connection:
            await write(connection, store, *store.writing.insert([message()], NOW))
            with suppress(DBAPIError):
                await connection.exec_driver_sql("SELECT no_such_column FROM no_such_table")
            aborted = await connection.run_sync(store.transactions.aborted)
            with suppress(DBAPIError):  # others say so
                await connection.commit()
        kept = await claimed(store, destination=None)
        assert (aborted is None) == bool(kept)

    async def test_a_committed_message_is_stored(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(body=b"1"))
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"1"]

    async def test_a_rolled_back_message_leaves_no_trace(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            await write(connection, store, *store.writing.insert([message()], NOW))
            await connection.rollback()
        assert await claimed(store, destination=None) == []

    async def test_a_savepoint_takes_its_messages_with_it(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.begin() as connection:
            await write(connection, store, *store.writing.insert([message(body=b"kept")], NOW))
            savepoint = await connection.begin_nested()
            await write(connection, store, *store.writing.insert([message(body=b"gone")], NOW))
            await savepoint.rollback()
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"kept"]

    async def test_an_uncommitted_message_is_seen_by_nobody(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            await write(connection, store, *store.writing.insert([message()], NOW))
            assert (await store.inspection.backlog()).waiting == 0
            await connection.commit()
        assert (await store.inspection.backlog()).waiting == 1

    async def test_a_message_is_unchanged_from_emit_to_claim(self, engine: AsyncEngine, store: Store) -> None:
        sent = message(
            "ключ.🚀",
            bytes(range(256)),
            content_type="application/x-thing",
            headers={"trace": "äöü", "empty": ""},
            key="customer-1",
            tracking_ids=("first", "second", "third"),
        )
        await queued(engine, store, sent)
        [attempt] = await claimed(store)
        assert attempt.message == sent
        assert attempt.message.id == "third"

    async def test_a_message_without_extras_is_unchanged_too(self, engine: AsyncEngine, store: Store) -> None:
        sent = message(body=b"")
        await emit(engine, store, sent)
        [attempt] = await claimed(store, destination=None)
        assert attempt.message == sent

    async def test_many_messages_are_written_at_once(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, *(message(body=str(n).encode()) for n in range(250)))
        found = {attempt.message.body for attempt in await claimed(store, 1000, None)}
        assert found == {str(n).encode() for n in range(250)}

    # Due times and timers.

    async def test_a_delayed_message_comes_after_its_delay_and_not_before(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(milliseconds=400)))
        await soon(lambda: claimed(store, destination=None))
        assert loop.time() - began >= 0.399

    async def test_an_absolute_time_in_the_future_is_kept(self, engine: AsyncEngine, store: Store) -> None:
        due = datetime.now(UTC) + timedelta(hours=1)
        await emit(engine, store, message(), schedule=Schedule(due=due))
        assert await claimed(store, destination=None) == []
        [stored] = await store.inspection.list_messages()
        assert abs(stored.due_at - due) < timedelta(milliseconds=2)

    async def test_a_time_in_the_past_is_due_at_once(self, engine: AsyncEngine, store: Store) -> None:
        due = datetime.now(UTC) - timedelta(days=1)
        await emit(engine, store, message(), schedule=Schedule(due=due))
        assert len(await claimed(store, destination=None)) == 1

    async def test_the_earliest_time_there_is_is_due_at_once(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(due=EARLIEST))
        assert len(await claimed(store, destination=None)) == 1

    async def test_a_delayed_message_is_not_routed_before_it_is_due(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1)))
        assert (await store.queues.route(100, {})).taken == 0

    async def test_a_timer_that_waits_is_not_set_twice(self, engine: AsyncEngine, store: Store) -> None:
        timer = Schedule(due=timedelta(hours=1), timer_id="t")
        assert await emit(engine, store, message(body=b"first"), schedule=timer) == 1
        assert await emit(engine, store, message(body=b"second"), schedule=timer) == 0
        [stored] = await store.inspection.list_messages()
        assert (stored.message.body, stored.timer_id) == (b"first", "t")

    async def test_different_timers_do_not_disturb_each_other(self, engine: AsyncEngine, store: Store) -> None:
        for name in ("a", "b"):
            assert await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1), timer_id=name)) == 1

    async def test_a_cancelled_timer_is_gone_and_can_be_set_again(self, engine: AsyncEngine, store: Store) -> None:
        timer = Schedule(due=timedelta(hours=1), timer_id="t")
        await emit(engine, store, message(), schedule=timer)
        async with engine.begin() as connection:
            assert await write(connection, store, *store.writing.cancel("t")) == 1
            assert await write(connection, store, *store.writing.cancel("t")) == 0
            assert await write(connection, store, *store.writing.insert([message()], timer)) == 1

    async def test_cancelling_rolls_back_with_its_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1), timer_id="t"))
        async with engine.connect() as connection:
            assert await write(connection, store, *store.writing.cancel("t")) == 1
            await connection.rollback()
        assert len(await store.inspection.list_messages()) == 1

    async def test_a_timer_that_a_relay_holds_is_not_cancelled(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(timer_id="t"))
        async with store.feed.claim(Selection(limit=1, lease=LEASE)) as claim:
            assert len(claim.attempts) == 1
            async with engine.begin() as connection:
                assert await write(connection, store, *store.writing.cancel("t")) == 0

    async def test_a_timer_that_was_sent_is_not_cancelled(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await emit(engine, store, message(), schedule=Schedule(timer_id="t"))
        await settled(store, Done(), None)
        async with engine.begin() as connection:
            assert await write(connection, store, *store.writing.cancel("t")) == 0
        assert [stored.state for stored in await store.inspection.list_messages()] == ["sent"]

    async def test_a_timer_that_fired_can_be_set_again(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(), schedule=Schedule(timer_id="t"))
        async with engine.begin() as connection:
            assert await write(connection, store, *store.writing.cancel("t")) == 0
        assert await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1), timer_id="t")) == 1

    # Expiry.

    async def test_an_expired_message_is_not_attempted_but_a_dead_letter(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        past = datetime.now(UTC) - timedelta(minutes=1)
        await queued(engine, store, message(body=b"old"), schedule=Schedule(due=past, expiration=timedelta(seconds=1)))
        assert await claimed(store) == []
        [letter] = await store.dead_letters.list()
        assert (letter.reason, letter.message.body, letter.attempt_count) == (Reason.EXPIRED, b"old", 0)
        assert letter.history.endswith("Z given up: its expiration passed\n")

    async def test_expiration_counts_from_when_the_message_is_due(self, engine: AsyncEngine, store: Store) -> None:
        schedule = Schedule(due=timedelta(milliseconds=300), expiration=timedelta(minutes=1))
        await emit(engine, store, message(), schedule=schedule)
        [attempt] = await soon(lambda: claimed(store, destination=None))
        assert attempt.message.expires_at is not None

    async def test_expired_messages_that_nobody_claims_die_as_well(self, engine: AsyncEngine, store: Store) -> None:
        past = datetime.now(UTC) - timedelta(minutes=1)
        schedule = Schedule(due=past, expiration=timedelta(seconds=1))
        await emit(engine, store, *(message(body=str(n).encode()) for n in range(5)), schedule=schedule)
        await emit(engine, store, message(body=b"fresh"))
        assert [
            await store.maintenance.expire(3),
            await store.maintenance.expire(3),
            await store.maintenance.expire(3),
        ] == [3, 2, 0]
        letters = await store.dead_letters.list()
        assert {letter.reason for letter in letters} == {Reason.EXPIRED}
        assert all(letter.history.endswith("Z given up: its expiration passed\n") for letter in letters)
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"fresh"]

    async def test_a_message_in_somebodys_hands_does_not_expire_under_them(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "#")])
        async with AsyncExitStack() as stack:
            claim, lifetime = await claimed_before_it_expires(stack, engine, store, "q")
            await asyncio.sleep(lifetime.total_seconds())
            assert await store.maintenance.expire(10) == 0
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
        assert await store.dead_letters.list() == []

    async def test_a_message_that_was_sent_does_not_expire_any_more(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=NEVER)
        async with AsyncExitStack() as stack:
            claim, lifetime = await claimed_before_it_expires(stack, engine, store, None)
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
        await asyncio.sleep(lifetime.total_seconds())
        assert await store.maintenance.expire(10) == 0
        assert [stored.state for stored in await store.inspection.list_messages()] == ["sent"]

    # The inbox.

    async def test_the_inbox_takes_a_message_once_for_each_queue(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.begin() as connection:
            assert await write(connection, store, *store.inbox.remember("a", "1")) == 1
            assert await write(connection, store, *store.inbox.remember("a", "1")) == 0
            assert await write(connection, store, *store.inbox.remember("b", "1")) == 1
            assert await write(connection, store, *store.inbox.remember("a", "2")) == 1

    async def test_the_inbox_takes_many_and_says_which_are_new(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.begin() as connection:
            assert await write(connection, store, *store.inbox.remember("a", "2")) == 1
            assert await write(connection, store, *store.inbox.remember("b", "1")) == 1
            assert await connection.run_sync(store.inbox.remember_all, "a", ["3", "2", "1", "ü'\\"]) == {
                "1",
                "3",
                "ü'\\",
            }
            assert await connection.run_sync(store.inbox.remember_all, "a", ["1", "2"]) == set()

    async def test_an_entry_under_another_name_of_the_queue_counts_where_it_is_named(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        async with engine.begin() as connection:
            assert await connection.run_sync(store.inbox.remember_all, "a", ["1", "2"]) == {"1", "2"}
            assert await write(connection, store, *store.inbox.remember("eu.a", "1", also="a")) == 0
            assert await write(connection, store, *store.inbox.remember("eu.a", "3", also="a")) == 1
            assert await write(connection, store, *store.inbox.remember("eu.a", "3", also="a")) == 0
            entering = partial(store.inbox.remember_all, also="a")
            assert await connection.run_sync(entering, "eu.a", ["1", "2", "3", "4"]) == {"4"}
            assert await write(connection, store, *store.inbox.remember("us.a", "3", also="b")) == 1
        received = await store.queues.receive("a", [message(tracking_ids=(id,)) for id in ("3", "5")], also="eu.a")
        assert received.stored == {"5"}

    async def test_inbox_entries_are_taken_out_again_by_the_transaction_that_made_them(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        async with engine.begin() as connection:
            assert await connection.run_sync(store.inbox.remember_all, "a", ["1", "2", "3"]) == {"1", "2", "3"}
            assert await connection.run_sync(store.inbox.remember_all, "b", ["1"]) == {"1"}
            await connection.run_sync(store.inbox.forget, "a", ["1", "3"])
        async with engine.begin() as connection:
            assert await connection.run_sync(store.inbox.remember_all, "a", ["1", "2", "3"]) == {"1", "3"}
            assert await connection.run_sync(store.inbox.remember_all, "b", ["1"]) == set()

    async def test_an_inbox_entry_rolls_back_with_its_transaction(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            assert await write(connection, store, *store.inbox.remember("a", "1")) == 1
            await connection.rollback()
            assert await write(connection, store, *store.inbox.remember("a", "1")) == 1
            await connection.commit()

    async def test_inbox_entries_are_forgotten_in_bounded_batches_when_they_are_old(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        async with engine.begin() as connection:
            for n in range(5):
                await write(connection, store, *store.inbox.remember("a", str(n)))
        assert await store.inbox.purge(timedelta(hours=1), 100) == 0
        await asyncio.sleep(0.01)
        assert [await store.inbox.purge(timedelta(0), 3) for _ in range(3)] == [3, 2, 0]
