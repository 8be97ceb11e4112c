"""StoreContract: what every store must do. Inherit it for a new database:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def engine(self): ...           # an AsyncEngine, the caller's
        @pytest.fixture
        async def make_store(self, engine): ...  # make_store(clean_up_after=IMMEDIATELY) -> Store, on the same tables

Each test's name is a promise; the guarantees page names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.binding import Binding
from outbox.core.durations import NEVER
from outbox.core.errors import ConfigurationError, NotFound
from outbox.core.message import NOW, Message, Schedule
from outbox.core.store import Claim, Store

LEASE = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)
SOON = 15.0  # seconds within which everything that is due must have come

MakeStore = Callable[..., Store]


def message(routing_key: str = "order.created", body: bytes = b"{}", **fields: Any) -> Message:
    """A message for a test."""
    return Message(routing_key=routing_key, body=body, **fields)


async def write(connection: AsyncConnection, store: Store, statement: Executable, rows: Any = None) -> int:
    """Execute a store's statement on a caller's connection."""
    return await connection.run_sync(store.write, statement, rows)


async def emit(engine: AsyncEngine, store: Store, *messages: Message, schedule: Schedule = NOW) -> int:
    """Store messages in a committed transaction of the caller's."""
    async with engine.begin() as connection:
        return await write(connection, store, *store.insert(messages, schedule))


async def queued(engine: AsyncEngine, store: Store, *messages: Message, schedule: Schedule = NOW) -> None:
    """Store messages and route them to the queue `q`."""
    await store.bind([Binding("q", "#")])
    await emit(engine, store, *messages, schedule=schedule)
    assert (await store.route(1000, {})).taken == len(messages)


async def claimed(store: Store, limit: int = 100, destination: str | None = "q") -> list[Attempt]:
    """What a claim gets; given back at once."""
    async with store.claim(limit, lease=LEASE, destination=destination) as claim:
        return list(claim.attempts)


async def soon(look: Callable[[], Any]) -> Any:
    """Look until there is something to see."""
    async with asyncio.timeout(SOON):
        while not (found := await look()):
            await asyncio.sleep(0.02)
    return found


async def settled(store: Store, outcome: Outcome, destination: str | None = "q") -> Attempt:
    """Claim one message and settle it."""
    async with store.claim(1, lease=LEASE, destination=destination) as claim:
        [attempt] = claim.attempts
        assert await claim.settle({attempt.id: outcome}) == frozenset()
    return attempt


OUTCOMES: Mapping[str, Outcome] = {
    "done": Done(),
    "retry": RetryIn(timedelta(0), "late"),
    "dead": Dead(Reason.REJECTED, "late"),
    "released": Released(),
}


@pytest.mark.asyncio
class StoreContract:
    """Every method and every outcome."""

    writes_side_by_side = True  # whether two transactions of the database can write at the same time

    @pytest.fixture
    async def store(self, make_store: MakeStore) -> Store:
        """A store with its tables."""
        store = make_store()
        await store.open()
        return store

    def crash(self, claim: Claim) -> None:
        """Make a claim stop renewing itself, as if its process had died. Override it if yours renews otherwise."""
        claim._renewal.cancel()  # type: ignore[attr-defined]

    async def expired(self, stack: AsyncExitStack, store: Store, limit: int = 100) -> Claim:
        """A claim whose lease has run out while its holder still believes in it."""
        claim = await stack.enter_async_context(store.claim(limit, lease=SHORT, destination="q"))
        assert claim.attempts
        self.crash(claim)
        await asyncio.sleep(SHORT.total_seconds() + 0.05)
        return claim

    # Tables.

    async def test_tables_can_be_made_again_and_again(self, store: Store) -> None:
        await store.create_tables()
        await store.create_tables()

    async def test_tables_can_be_made_by_many_at_once(self, make_store: MakeStore) -> None:
        await asyncio.gather(*(make_store().create_tables() for _ in range(5)))

    async def test_the_first_write_makes_the_tables(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store()
        assert await emit(engine, store, message()) == 1
        assert len(await claimed(store, destination=None)) == 1

    async def test_the_first_write_makes_the_tables_even_if_it_rolls_back(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store()
        async with engine.connect() as connection:
            await write(connection, store, *store.insert([message()], NOW))
            await connection.rollback()
        await emit(engine, store, message(body=b"kept"))
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"kept"]

    # Emitting.

    async def test_a_committed_message_is_stored(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(body=b"1"))
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"1"]

    async def test_a_rolled_back_message_leaves_no_trace(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            await write(connection, store, *store.insert([message()], NOW))
            await connection.rollback()
        assert await claimed(store, destination=None) == []

    async def test_a_savepoint_takes_its_messages_with_it(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.begin() as connection:
            await write(connection, store, *store.insert([message(body=b"kept")], NOW))
            savepoint = await connection.begin_nested()
            await write(connection, store, *store.insert([message(body=b"gone")], NOW))
            await savepoint.rollback()
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"kept"]

    async def test_an_uncommitted_message_is_seen_by_nobody(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            await write(connection, store, *store.insert([message()], NOW))
            assert (await store.backlog()).waiting == 0
            await connection.commit()
        assert (await store.backlog()).waiting == 1

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
        assert await claimed(store, destination=None) == []
        await soon(lambda: claimed(store, destination=None))
        assert loop.time() - began >= 0.399

    async def test_an_absolute_time_in_the_future_is_kept(self, engine: AsyncEngine, store: Store) -> None:
        due = datetime.now(UTC) + timedelta(hours=1)
        await emit(engine, store, message(), schedule=Schedule(due=due))
        assert await claimed(store, destination=None) == []
        [stored] = await store.list_messages()
        assert abs(stored.due_at - due) < timedelta(milliseconds=2)

    async def test_a_time_in_the_past_is_due_at_once(self, engine: AsyncEngine, store: Store) -> None:
        due = datetime.now(UTC) - timedelta(days=1)
        await emit(engine, store, message(), schedule=Schedule(due=due))
        assert len(await claimed(store, destination=None)) == 1

    async def test_a_delayed_message_is_not_routed_before_it_is_due(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("q", "#")])
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1)))
        assert (await store.route(100, {})).taken == 0

    async def test_a_timer_that_waits_is_not_set_twice(self, engine: AsyncEngine, store: Store) -> None:
        timer = Schedule(due=timedelta(hours=1), timer_id="t")
        assert await emit(engine, store, message(body=b"first"), schedule=timer) == 1
        assert await emit(engine, store, message(body=b"second"), schedule=timer) == 0
        [stored] = await store.list_messages()
        assert (stored.message.body, stored.timer_id) == (b"first", "t")

    async def test_different_timers_do_not_disturb_each_other(self, engine: AsyncEngine, store: Store) -> None:
        for name in ("a", "b"):
            assert await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1), timer_id=name)) == 1

    async def test_a_cancelled_timer_is_gone_and_can_be_set_again(self, engine: AsyncEngine, store: Store) -> None:
        timer = Schedule(due=timedelta(hours=1), timer_id="t")
        await emit(engine, store, message(), schedule=timer)
        async with engine.begin() as connection:
            assert await write(connection, store, store.cancel("t")) == 1
            assert await write(connection, store, store.cancel("t")) == 0
            assert await write(connection, store, *store.insert([message()], timer)) == 1

    async def test_cancelling_rolls_back_with_its_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1), timer_id="t"))
        async with engine.connect() as connection:
            assert await write(connection, store, store.cancel("t")) == 1
            await connection.rollback()
        assert len(await store.list_messages()) == 1

    async def test_a_timer_that_a_relay_holds_is_not_cancelled(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(timer_id="t"))
        async with store.claim(1, lease=LEASE) as claim:
            assert len(claim.attempts) == 1
            async with engine.begin() as connection:
                assert await write(connection, store, store.cancel("t")) == 0

    async def test_a_timer_that_fired_can_be_set_again(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(), schedule=Schedule(timer_id="t"))
        async with engine.begin() as connection:
            assert await write(connection, store, store.cancel("t")) == 0
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
        assert [await store.expire(3), await store.expire(3), await store.expire(3)] == [3, 2, 0]
        assert {letter.reason for letter in await store.dead_letters.list()} == {Reason.EXPIRED}
        assert [attempt.message.body for attempt in await claimed(store, destination=None)] == [b"fresh"]

    async def test_a_message_in_somebodys_hands_does_not_expire_under_them(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(), schedule=Schedule(expiration=timedelta(milliseconds=300)))
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            assert len(claim.attempts) == 1
            await asyncio.sleep(0.35)
            assert await store.expire(10) == 0
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
        assert await store.dead_letters.list() == []

    # The inbox.

    async def test_the_inbox_takes_a_message_once_for_each_queue(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.begin() as connection:
            assert await write(connection, store, store.remember("a", "1")) == 1
            assert await write(connection, store, store.remember("a", "1")) == 0
            assert await write(connection, store, store.remember("b", "1")) == 1
            assert await write(connection, store, store.remember("a", "2")) == 1

    async def test_an_inbox_entry_rolls_back_with_its_transaction(self, engine: AsyncEngine, store: Store) -> None:
        async with engine.connect() as connection:
            assert await write(connection, store, store.remember("a", "1")) == 1
            await connection.rollback()
            assert await write(connection, store, store.remember("a", "1")) == 1
            await connection.commit()

    async def test_inbox_entries_are_forgotten_in_bounded_batches_when_they_are_old(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        async with engine.begin() as connection:
            for n in range(5):
                await write(connection, store, store.remember("a", str(n)))
        assert await store.purge_inbox(timedelta(hours=1), 100) == 0
        await asyncio.sleep(0.01)
        assert [await store.purge_inbox(timedelta(0), 3) for _ in range(3)] == [3, 2, 0]

    # Claiming.

    async def test_a_claim_takes_no_more_than_its_limit_and_the_oldest_first(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        for n in range(5):
            await emit(engine, store, message(body=str(n).encode()))
        assert [attempt.message.body for attempt in await claimed(store, 3, None)] == [b"0", b"1", b"2"]

    async def test_two_claims_never_share_a_message(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        await queued(engine, stores[0], *(message() for _ in range(100)))
        async with AsyncExitStack() as stack:
            claims = await asyncio.gather(
                *(stack.enter_async_context(store.claim(30, lease=LEASE, destination="q")) for store in stores)
            )
            ids = [attempt.id for claim in claims for attempt in claim.attempts]
            assert len(ids) == len(set(ids)) == 100

    async def test_a_claim_sees_only_its_destination(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("a", "a"), Binding("b", "b")])
        await emit(engine, store, message("a"), message("b"), message("c"))
        await store.route(100, {})
        assert [attempt.message.routing_key for attempt in await claimed(store, destination="a")] == ["a"]
        assert [attempt.message.routing_key for attempt in await claimed(store, destination="b")] == ["b"]

    async def test_what_is_not_settled_is_given_back_and_counts_as_no_start(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        for _ in range(5):
            [attempt] = await claimed(store)
            assert (attempt.attempt_count, attempt.crash_count) == (1, 0)

    async def test_a_claim_that_ends_in_an_error_gives_everything_back(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        with pytest.raises(RuntimeError):
            async with store.claim(1, lease=LEASE, destination="q"):
                raise RuntimeError
        assert len(await claimed(store)) == 1

    async def test_a_claim_that_is_cancelled_gives_everything_back(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        taken = asyncio.Event()

        async def hold() -> None:
            async with store.claim(1, lease=LEASE, destination="q"):
                taken.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(hold())
        await taken.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(await claimed(store)) == 1

    @pytest.mark.parametrize("steps", range(0, 40, 3))
    async def test_a_claim_cancelled_while_it_is_made_loses_nothing(
        self, engine: AsyncEngine, store: Store, steps: int
    ) -> None:
        await queued(engine, store, message())

        async def hold() -> None:
            async with store.claim(1, lease=LEASE, destination="q"):
                await asyncio.sleep(60)

        task = asyncio.create_task(hold())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        [attempt] = await claimed(store)
        assert attempt.crash_count == 0

    async def test_an_empty_claim_is_harmless(self, store: Store) -> None:
        assert await claimed(store) == []
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            assert await claim.settle({}) == frozenset()

    async def test_a_message_committed_late_is_delivered_late_not_lost(self, engine: AsyncEngine, store: Store) -> None:
        """Nothing is skipped: no position over ids or times."""
        async with engine.connect() as late:
            await write(late, store, *store.insert([message(body=b"late")], NOW))
            if self.writes_side_by_side:
                await emit(engine, store, message(body=b"early"))
                assert (await settled(store, Done(), None)).message.body == b"early"
            assert await claimed(store, destination=None) == []
            await late.commit()
        assert (await settled(store, Done(), None)).message.body == b"late"

    # Leases.

    async def test_an_expired_lease_is_claimed_again(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            [attempt] = await claimed(store)
            assert (attempt.attempt_count, attempt.crash_count) == (1, 1)

    async def test_a_lease_is_renewed_while_its_holder_lives(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=timedelta(seconds=1.5), destination="q") as claim:
            await asyncio.sleep(2.5)
            assert await claimed(store) == []
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()

    @pytest.mark.parametrize("outcome", OUTCOMES)
    async def test_a_worker_whose_lease_expired_writes_nothing(
        self, engine: AsyncEngine, store: Store, outcome: str
    ) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            claim = await self.expired(stack, store)
            ids = {attempt.id for attempt in claim.attempts}
            assert await claim.settle(dict.fromkeys(ids, OUTCOMES[outcome])) == ids
            [attempt] = await claimed(store)
            assert attempt.id in ids
            assert await store.dead_letters.list() == []

    @pytest.mark.parametrize("outcome", OUTCOMES)
    async def test_a_worker_whose_message_was_claimed_by_another_writes_nothing(
        self, engine: AsyncEngine, store: Store, outcome: str
    ) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            late = await self.expired(stack, store)
            async with store.claim(1, lease=LEASE, destination="q") as current:
                [attempt] = current.attempts
                assert await late.settle({attempt.id: OUTCOMES[outcome]}) == {attempt.id}
                assert await current.settle({attempt.id: Done()}) == frozenset()
        assert await claimed(store) == []
        assert await store.dead_letters.list() == []

    async def test_a_late_completion_writes_nothing(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            late = await self.expired(stack, store)
            [attempt] = late.attempts
            async with engine.begin() as connection:
                assert await write(connection, store, late.completion(attempt)) == 0
            async with store.claim(1, lease=LEASE, destination="q") as current:
                async with engine.begin() as connection:
                    assert await write(connection, store, late.completion(attempt)) == 0
                assert await current.settle({attempt.id: Done()}) == frozenset()

    async def test_a_lease_that_expired_is_not_renewed(self, engine: AsyncEngine, store: Store) -> None:
        """A holder that slept through its lease must not extend it when it wakes up."""
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            claim = await self.expired(stack, store)
            await claim._renew_once({attempt.id for attempt in claim.attempts})  # type: ignore[attr-defined]
            assert len(await claimed(store)) == 1

    async def test_a_message_whose_last_start_never_ended_is_claimed_alone(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(3)))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, *(message(body=b"fresh") for _ in range(2)))
            for _ in range(3):
                async with store.claim(100, lease=LEASE, destination="q") as claim:
                    [attempt] = claim.attempts
                    assert attempt.crash_count == 1
                    await claim.settle({attempt.id: Done()})
            assert len(await claimed(store)) == 2

    async def test_whoever_wants_no_suspects_gets_none(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(body=b"suspect"))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, message(body=b"fresh"))
            async with store.claim(10, lease=LEASE, destination="q", suspects=False) as claim:
                assert [attempt.message.body for attempt in claim.attempts] == [b"fresh"]
            async with store.claim(10, lease=LEASE, destination="q", suspects=True) as claim:
                assert [attempt.message.body for attempt in claim.attempts] == [b"suspect"]

    async def test_crashes_are_counted_apart_from_attempts(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            attempt = await settled(store, RetryIn(timedelta(0), "failed"))
            assert (attempt.attempt_count, attempt.crash_count) == (1, 1)
            await self.expired(stack, store)
            attempt = await settled(store, Released())
            assert (attempt.attempt_count, attempt.crash_count) == (2, 2)

    # Settling.

    async def test_done_removes_the_message(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        await settled(store, Done())
        assert await store.list_messages() == []
        assert await store.dead_letters.list() == []

    async def test_done_keeps_the_message_if_it_is_told_to(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await queued(engine, store, message())
        await settled(store, Done())
        [stored] = await store.list_messages()
        assert (stored.state, stored.attempt_count, stored.leased_until) == ("sent", 1, None)
        assert stored.done_at is not None
        assert await claimed(store) == []

    async def test_retry_comes_back_after_its_delay_and_not_before(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await settled(store, RetryIn(timedelta(milliseconds=400), "boom"))
        assert await claimed(store) == []
        [attempt] = await soon(lambda: claimed(store))
        assert loop.time() - began >= 0.399
        assert (attempt.attempt_count, attempt.crash_count) == (2, 0)

    async def test_retry_without_delay_comes_back_at_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        await settled(store, RetryIn(timedelta(0), "boom"))
        [attempt] = await soon(lambda: claimed(store))
        assert attempt.attempt_count == 2

    async def test_every_failed_attempt_is_written_down(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        for n in (1, 2):
            await soon(lambda: claimed(store))
            await settled(store, RetryIn(timedelta(0), f"ValueError: boom {n}\nwith a second line"))
        [stored] = await store.list_messages()
        first, second = stored.history.splitlines()
        assert first.endswith("attempt 1 failed: ValueError: boom 1")
        assert second.endswith("attempt 2 failed: ValueError: boom 2")

    async def test_history_does_not_grow_without_end(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        for _ in range(20):
            await soon(lambda: claimed(store))
            await settled(store, RetryIn(timedelta(0), "x" * 5000))
        [stored] = await store.list_messages()
        assert len(stored.history) <= 16 * 1024
        assert stored.history.splitlines()[-1].startswith("20")

    async def test_dead_moves_the_unchanged_message_with_its_reason(self, engine: AsyncEngine, store: Store) -> None:
        sent = message(body=bytes(range(256)), headers={"a": "b"}, key="k", tracking_ids=("x", "y"))
        await queued(engine, store, sent)
        await settled(store, RetryIn(timedelta(0), "first"))
        await soon(lambda: claimed(store))
        await settled(store, Dead(Reason.EXHAUSTED, "second"))
        assert await store.list_messages() == []
        [letter] = await store.dead_letters.list()
        assert letter.message == sent
        assert (letter.queue, letter.reason, letter.error) == ("q", Reason.EXHAUSTED, "second")
        assert (letter.attempt_count, letter.crash_count) == (2, 0)
        assert "first" in letter.history

    @pytest.mark.parametrize("reason", Reason)
    async def test_every_reason_can_be_stored(self, engine: AsyncEngine, store: Store, reason: Reason) -> None:
        await queued(engine, store, message())
        await settled(store, Dead(reason, "why"))
        [letter] = await store.dead_letters.list()
        assert letter.reason is reason
        assert letter.attempt_count == (0 if reason in (Reason.EXPIRED, Reason.CRASHED) else 1)
        assert letter.crash_count == 0

    async def test_a_hostile_error_text_is_stored_capped_and_clean(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(), message())
        async with store.claim(2, lease=LEASE, destination="q") as claim:
            dead, retried = claim.attempts
            text = "\x00\x1b[31m\ud800💥'\"; DROP TABLE x; --" + "ä" * 20_000
            lost = await claim.settle({dead.id: Dead(Reason.REJECTED, text), retried.id: RetryIn(LEASE, text)})
            assert lost == frozenset()
        [letter] = await store.dead_letters.list()
        assert len(letter.error.encode()) <= 8 * 1024
        assert "\x00" not in letter.error
        assert "DROP TABLE" in letter.error

    async def test_many_outcomes_are_settled_together(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(40)))
        async with store.claim(40, lease=LEASE, destination="q") as claim:
            kinds = list(OUTCOMES.values())
            outcomes = {attempt.id: kinds[n % 4] for n, attempt in enumerate(claim.attempts)}
            assert await claim.settle(outcomes) == frozenset()
        assert len(await store.dead_letters.list()) == 10
        states = [stored.state for stored in await store.list_messages()]
        assert sorted(states) == ["delivered"] * 10 + ["retrying"] * 10

    async def test_settling_twice_writes_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            [attempt] = claim.attempts
            assert await claim.settle({attempt.id: RetryIn(LEASE, "x")}) == frozenset()
            assert await claim.settle({attempt.id: Done()}) == {attempt.id}
        assert len(await store.list_messages()) == 1

    async def test_a_part_of_a_claim_can_be_settled_before_the_rest(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(), message())
        async with store.claim(2, lease=LEASE, destination="q") as claim:
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
            assert await claimed(store) == []
        assert [attempt.id for attempt in await claimed(store)] == [claim.attempts[1].id]

    # Completion in the listener's transaction.

    async def test_a_completion_commits_with_the_listeners_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            [attempt] = claim.attempts
            async with engine.begin() as connection:
                assert await write(connection, store, claim.completion(attempt)) == 1
            assert await claim.settle({attempt.id: Done(in_transaction=True)}) == frozenset()
        assert await store.list_messages() == []

    async def test_a_completion_rolls_back_with_the_listeners_transaction(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            [attempt] = claim.attempts
            async with engine.connect() as connection:
                assert await write(connection, store, claim.completion(attempt)) == 1
                await connection.rollback()
            assert await claim.settle({attempt.id: RetryIn(timedelta(0), "x")}) == frozenset()
        assert len(await soon(lambda: claimed(store))) == 1

    async def test_a_completion_counts_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            [attempt] = claim.attempts
            async with engine.begin() as connection:
                assert await write(connection, store, claim.completion(attempt)) == 1
                assert await write(connection, store, claim.completion(attempt)) == 0
            await claim.settle({attempt.id: Done(in_transaction=True)})

    async def test_a_completion_keeps_the_message_if_it_is_told_to(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=NEVER)
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            async with engine.begin() as connection:
                assert await write(connection, store, claim.completion(claim.attempts[0])) == 1
            await claim.settle({claim.attempts[0].id: Done(in_transaction=True)})
        [stored] = await store.list_messages()
        assert stored.state == "sent"

    # Routing.

    async def test_a_message_goes_to_every_queue_that_is_bound_to_it(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("a", "order.*"), Binding("b", "#"), Binding("c", "user.#")])
        sent = message("order.created", b"1", headers={"h": "v"}, key="k", tracking_ids=("x", "y"))
        await emit(engine, store, sent)
        routing = await store.route(100, {})
        assert (routing.taken, dict(routing.routed)) == (1, {"a": 1, "b": 1})
        for queue in ("a", "b"):
            assert [attempt.message for attempt in await claimed(store, destination=queue)] == [sent]
        assert await claimed(store, destination="c") == []
        assert (await store.route(100, {})).taken == 0

    async def test_each_queue_has_its_own_attempts_and_dead_letters(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("a", "#"), Binding("b", "#"), Binding("c", "#")])
        await emit(engine, store, message())
        await store.route(100, {})
        await settled(store, Done(), "a")
        await settled(store, Dead(Reason.REJECTED, "x"), "b")
        await settled(store, RetryIn(timedelta(0), "x"), "c")
        assert [letter.queue for letter in await store.dead_letters.list()] == ["b"]
        [attempt] = await soon(lambda: claimed(store, destination="c"))
        assert attempt.attempt_count == 2

    async def test_two_bindings_of_one_queue_bring_the_message_once(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("q", "order.*"), Binding("q", "#.created")])
        await emit(engine, store, message("order.created"))
        assert dict((await store.route(100, {})).routed) == {"q": 1}
        assert len(await claimed(store)) == 1

    async def test_a_message_nobody_is_bound_to_waits_out_of_the_way(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message("lonely"))
        routing = await store.route(100, {})
        assert dict(routing.unroutable) == {"lonely": 1}
        assert (await store.route(100, {})).taken == 0
        backlog = await store.backlog()
        assert (backlog.unroutable, backlog.waiting) == (1, 0)
        assert [stored.state for stored in await store.list_messages()] == ["unroutable"]

    async def test_an_unroutable_message_is_looked_at_again_by_itself(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message("lonely"))
        await store.route(100, {})

        async def again() -> int:
            return (await store.route(100, {})).taken

        assert await soon(again) == 1

    async def test_a_new_binding_brings_the_messages_that_waited_for_it(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await emit(engine, store, *(message("lonely") for _ in range(5)))
        await store.route(100, {})
        await store.bind([Binding("q", "lonely")])
        assert dict((await store.route(100, {})).routed) == {"q": 5}
        assert (await store.backlog()).unroutable == 0
        [attempt, *_] = await claimed(store)
        assert (attempt.attempt_count, attempt.crash_count) == (1, 0)

    async def test_messages_nobody_needs_are_discarded(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("q", "audit.important")])
        await emit(engine, store, message("audit.login"), message("audit.important"), message("other"))
        routing = await store.route(100, {"audit.#": "discard"})
        assert (routing.discarded, dict(routing.unroutable), dict(routing.routed)) == (1, {"other": 1}, {"q": 1})
        assert {stored.message.routing_key for stored in await store.list_messages()} == {"audit.important", "other"}

    async def test_routing_takes_no_more_than_its_limit(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("q", "#")])
        await emit(engine, store, *(message() for _ in range(5)))
        assert [(await store.route(2, {})).taken for _ in range(4)] == [2, 2, 1, 0]

    async def test_many_routers_at_once_route_each_message_once(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].bind([Binding("a", "#"), Binding("b", "#")])
        await emit(engine, stores[0], *(message(body=str(n).encode()) for n in range(200)))

        async def route(store: Store) -> None:
            while (await store.route(20, {})).taken:
                pass

        await asyncio.gather(*map(route, stores))
        for queue in ("a", "b"):
            bodies = [attempt.message.body for attempt in await claimed(stores[0], 1000, queue)]
            assert len(bodies) == len(set(bodies)) == 200

    async def test_bindings_are_kept_listed_and_removed(self, store: Store, make_store: MakeStore) -> None:
        await store.bind([Binding("b", "x"), Binding("a", "y"), Binding("a", "x")])
        await store.bind([Binding("a", "x")])
        expected = [Binding("a", "x"), Binding("a", "y"), Binding("b", "x")]
        assert await make_store().bindings() == expected
        assert await store.unbind("a") == 2
        assert await store.unbind("a") == 0
        assert await store.bindings() == [Binding("b", "x")]

    async def test_a_removed_binding_brings_nothing_more_and_keeps_what_lies_there(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(body=b"1"))
        await store.unbind("q")
        await emit(engine, store, message(body=b"2"))
        assert dict((await store.route(100, {})).unroutable) == {"order.created": 1}
        assert [attempt.message.body for attempt in await claimed(store)] == [b"1"]

    async def test_a_router_notices_bindings_that_another_made(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        first, second = make_store(), make_store()
        await first.bind([Binding("a", "#")])
        await emit(engine, first, message())
        await first.route(10, {})
        await second.bind([Binding("b", "#")])
        await emit(engine, first, message())
        assert dict((await first.route(10, {})).routed) == {"a": 1, "b": 1}

    async def test_messages_can_be_delivered_straight_to_queues(self, store: Store) -> None:
        both, one, none = message(body=b"both"), message(body=b"one"), message(body=b"none")
        await store.deliver([both, one, none], {both.id: ["a", "b"], one.id: ["a"], none.id: []})
        assert {attempt.message.body for attempt in await claimed(store, destination="a")} == {b"both", b"one"}
        assert {attempt.message.body for attempt in await claimed(store, destination="b")} == {b"both"}
        assert await claimed(store, destination=None) == []

    # The recorded transport.

    async def test_the_first_transport_is_recorded_and_kept(self, store: Store, make_store: MakeStore) -> None:
        assert await store.record_transport("database") == "database"
        assert await make_store().record_transport("rabbitmq") == "database"
        assert await store.record_transport("rabbitmq", switch=True) == "rabbitmq"
        assert await store.record_transport("database") == "rabbitmq"

    async def test_of_many_first_transports_one_wins(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].create_tables()
        names = await asyncio.gather(*(store.record_transport(f"t{n}") for n, store in enumerate(stores)))
        assert len(set(names)) == 1

    # Waiting.

    async def test_a_wait_ends_in_time_when_nothing_happens(self, store: Store) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await store.wait(0.3, destination="q")
        assert 0.25 <= loop.time() - began < SOON

    async def test_an_announcement_ends_a_wait(self, store: Store) -> None:
        waiting = asyncio.create_task(store.wait(60, destination="q"))
        async with asyncio.timeout(SOON):
            while not waiting.done():
                store.announce("q")
                await asyncio.sleep(0.01)

    async def test_an_announcement_just_before_a_wait_is_not_missed(self, store: Store) -> None:
        await store.wait(0.01, destination="q")
        store.announce("q")
        async with asyncio.timeout(SOON):
            await store.wait(60, destination="q")

    async def test_a_wait_ends_when_the_next_message_is_due(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(milliseconds=500)))
        async with asyncio.timeout(SOON):
            await store.wait(60)
            await soon(lambda: claimed(store, destination=None))

    async def test_a_wait_ends_when_another_process_has_work(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        """Two stores share nothing but the database, as two processes do."""
        other = make_store()
        await emit(engine, other, message())  # tables and connections are warm
        await settled(other, Done(), None)
        waiting = asyncio.create_task(store.wait(60))
        async with asyncio.timeout(SOON):
            while not waiting.done():
                await emit(engine, other, message())
                other.announce(None)
                await asyncio.sleep(0.1)

    # Cleaning up.

    async def test_done_messages_are_purged_in_bounded_batches_when_they_are_old(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=timedelta(hours=1))
        await queued(engine, store, *(message() for _ in range(6)))
        async with store.claim(5, lease=LEASE, destination="q") as claim:
            await claim.settle({attempt.id: Done() for attempt in claim.attempts})
        assert await store.purge(timedelta(hours=1), 100) == 0
        await asyncio.sleep(0.01)
        assert [await store.purge(timedelta(0), 3) for _ in range(3)] == [3, 2, 0]
        assert [stored.state for stored in await store.list_messages()] == ["delivered"]

    # Dead letters.

    async def _dead(self, engine: AsyncEngine, store: Store, count: int = 3) -> Sequence[int]:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(count)))
        reasons = list(Reason)
        async with store.claim(count, lease=LEASE, destination="q") as claim:
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
        await store.bind([Binding("other", "#")])
        [id] = await self._dead(engine, store, 1)
        before = (await store.dead_letters.show(id)).message
        await settled(store, Done(), "other")
        assert await store.dead_letters.replay([id, id]) == 1
        [attempt] = await claimed(store)
        assert (attempt.message, attempt.attempt_count, attempt.crash_count) == (before, 1, 0)
        assert await claimed(store, destination="other") == []
        assert await store.dead_letters.list() == []

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
        assert await store.list_messages() == []

    # Looking.

    async def test_an_empty_store_has_an_empty_backlog(self, store: Store) -> None:
        backlog = await store.backlog()
        assert (backlog.waiting, backlog.due, backlog.leased, backlog.dead, backlog.oldest) == (0, 0, 0, 0, None)
        assert backlog.queues == ()

    async def test_the_backlog_counts_what_lies_where(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await store.bind([Binding("q", "order.*"), Binding("empty", "never")])
        await emit(engine, store, *(message() for _ in range(4)), message("lonely"))
        await store.route(100, {})
        await settled(store, Done())
        await settled(store, RetryIn(LEASE, "x"))
        await settled(store, Dead(Reason.REJECTED, "x"))
        await emit(engine, store, message())
        await emit(engine, store, message(), schedule=Schedule(due=timedelta(hours=1)))
        async with store.claim(1, lease=LEASE, destination="q") as claim:
            assert len(claim.attempts) == 1
            backlog = await store.backlog()
        assert (backlog.waiting, backlog.due, backlog.unroutable) == (2, 1, 1)
        assert (backlog.leased, backlog.sent, backlog.dead) == (1, 1, 1)
        assert backlog.oldest is not None
        assert backlog.oldest > timedelta(0)
        assert backlog.rows_written == 7
        empty, q = backlog.queues
        assert (empty.queue, empty.binding_keys, empty.delivered) == ("empty", ("never",), 0)
        assert (q.delivered, q.retrying, q.leased, q.dead) == (1, 1, 1, 1)

    async def test_messages_are_listed_by_state_and_queue(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await store.bind([Binding("q", "order.*")])
        await emit(engine, store, message(body=b"sent"), message(body=b"retrying"), message(body=b"delivered"))
        await emit(engine, store, message("lonely", body=b"unroutable"))
        await store.route(100, {})
        async with store.claim(3, lease=LEASE, destination="q") as claim:
            by_body = {attempt.message.body: attempt.id for attempt in claim.attempts}
            await claim.settle({by_body[b"sent"]: Done(), by_body[b"retrying"]: RetryIn(LEASE, "x")})
        await emit(engine, store, message(body=b"waiting"))
        for state in ("waiting", "unroutable", "delivered", "retrying", "sent"):
            [stored] = await store.list_messages(state=state)
            assert (stored.state, stored.message.body) == (state, state.encode())
        assert len(await store.list_messages(queue="q")) == 3
        everything = await store.list_messages()
        assert [stored.row_id for stored in await store.list_messages(limit=2, after=everything[0].row_id)] == [
            stored.row_id for stored in everything[1:3]
        ]
        with pytest.raises(ConfigurationError, match="no state"):
            await store.list_messages(state="lost")

    async def test_a_message_is_found_wherever_it_is(self, engine: AsyncEngine, store: Store) -> None:
        await store.bind([Binding("a", "#"), Binding("b", "#")])
        sent = message()
        await emit(engine, store, sent)
        [stored] = await store.find(sent.id)
        assert (stored.state, stored.queue, stored.routed_at) == ("waiting", None, None)
        await store.route(100, {})
        await settled(store, Dead(Reason.REJECTED, "no"), "a")
        delivered, dead = await store.find(sent.id)
        assert (delivered.state, delivered.queue, dead.state, dead.queue) == ("delivered", "b", "dead", "a")
        assert (dead.reason, dead.error) == ("rejected", "no")
        assert delivered.routed_at is not None
        assert await store.find("unknown") == []

    async def test_a_lease_is_shown_while_it_holds(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.claim(1, lease=LEASE, destination="q"):
            [stored] = await store.list_messages()
            assert stored.leased_until is not None
            assert stored.crash_count == 0
        [stored] = await store.list_messages()
        assert stored.leased_until is None
