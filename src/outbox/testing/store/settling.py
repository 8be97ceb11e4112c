"""SettlingCases: how attempts end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.durations import NEVER
from outbox.core.store import Selection, Store
from outbox.testing.store.cases import (
    LEASE,
    OUTCOMES,
    MakeStore,
    StoreCases,
    claimed,
    message,
    queued,
    settled,
    soon,
    write,
)


class SettlingCases(StoreCases):
    """How attempts end."""

    # Settling.

    async def test_done_removes_the_message(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        await settled(store, Done())
        assert await store.inspection.list_messages() == []
        assert await store.dead_letters.list() == []

    async def test_done_keeps_the_message_if_it_is_told_to(self, engine: AsyncEngine, make_store: MakeStore) -> None:
        store = make_store(clean_up_after=NEVER)
        await queued(engine, store, message())
        await settled(store, Done())
        [stored] = await store.inspection.list_messages()
        assert (stored.state, stored.attempt_count, stored.leased_until) == ("handled", 1, None)
        assert stored.done_at is not None
        assert await claimed(store) == []

    async def test_retry_comes_back_after_its_delay_and_not_before(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await settled(store, RetryIn(timedelta(milliseconds=400), "boom"))
        [attempt] = await soon(lambda: claimed(store))
        assert loop.time() - began >= 0.399
        assert (attempt.attempt_count, attempt.crash_count) == (2, 0)

    async def test_retry_without_delay_comes_back_at_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        await settled(store, RetryIn(timedelta(0), "boom"))
        [attempt] = await soon(lambda: claimed(store))
        assert attempt.attempt_count == 2

    async def test_what_is_given_back_for_later_comes_back_then_and_counts_as_no_start(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await settled(store, Released(timedelta(milliseconds=400)))
        [attempt] = await soon(lambda: claimed(store))
        assert loop.time() - began >= 0.399
        assert (attempt.attempt_count, attempt.crash_count) == (1, 0)
        [stored] = await store.inspection.list_messages()
        assert (stored.state, stored.history) == ("queued", "")

    @pytest.mark.parametrize(
        "outcome",
        [RetryIn(timedelta(0), "boom"), Released(timedelta(milliseconds=1))],
        ids=["retry", "postponed"],
    )
    async def test_a_message_stays_as_old_as_it_is_however_often_it_is_put_off(
        self, engine: AsyncEngine, store: Store, outcome: Outcome
    ) -> None:
        await queued(engine, store, message(created_at=datetime.now(UTC) - timedelta(days=1)))
        due_at = (await settled(store, outcome)).message.due_at
        assert due_at is not None
        for _ in range(2):
            await soon(lambda: claimed(store))
            assert (await settled(store, outcome)).message.due_at == due_at
        await soon(lambda: claimed(store))
        await settled(store, Dead(Reason.REFUSED, "no"))
        [letter] = await store.dead_letters.list()
        await store.dead_letters.replay([letter.id])
        again = (await settled(store, Done())).message.due_at
        assert again is not None
        assert again > due_at

    async def test_what_is_given_back_for_later_lets_others_go_first(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(body=b"first"), message(body=b"second"))
        first = await settled(store, Released(timedelta(milliseconds=1)))
        assert len(await soon(lambda: _both(store))) == 2
        [attempt, last] = await claimed(store)
        assert last.id == first.id != attempt.id

    async def test_every_failed_attempt_is_written_down(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        for n in (1, 2):
            await soon(lambda: claimed(store))
            await settled(store, RetryIn(timedelta(0), f"ValueError: boom {n}\nwith a second line"))
        [stored] = await store.inspection.list_messages()
        first, second = stored.history.splitlines()
        assert first.endswith("attempt 1 failed: ValueError: boom 1")
        assert second.endswith("attempt 2 failed: ValueError: boom 2")

    async def test_history_does_not_grow_without_end(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        for _ in range(20):
            await soon(lambda: claimed(store))
            await settled(store, RetryIn(timedelta(0), "x" * 5000))
        [stored] = await store.inspection.list_messages()
        assert len(stored.history) <= 16 * 1024
        assert stored.history.splitlines()[-1].startswith("20")

    async def test_dead_moves_the_unchanged_message_with_its_reason(self, engine: AsyncEngine, store: Store) -> None:
        sent = message(body=bytes(range(256)), headers={"a": "b"}, key="k", tracking_ids=("x", "y"))
        await queued(engine, store, sent)
        await settled(store, RetryIn(timedelta(0), "first"))
        await soon(lambda: claimed(store))
        await settled(store, Dead(Reason.EXHAUSTED, "second"))
        assert await store.inspection.list_messages() == []
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
        async with store.feed.claim(Selection(limit=2, lease=LEASE, destination="q")) as claim:
            dead, retried = claim.attempts
            text = "\x00\x1b[31m\ud800💥'\"; DROP TABLE x; --" + "ä" * 20_000
            lost = await claim.settle({dead.id: Dead(Reason.REJECTED, text), retried.id: RetryIn(LEASE, text)})
            assert lost == frozenset()
        [letter] = await store.dead_letters.list()
        assert len(letter.error.encode()) <= 8 * 1024
        assert "\x00" not in letter.error
        assert "DROP TABLE" in letter.error

    async def test_many_outcomes_are_settled_together(self, engine: AsyncEngine, store: Store) -> None:
        kinds = list(OUTCOMES.values())
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(10 * len(kinds))))
        async with store.feed.claim(Selection(limit=100, lease=LEASE, destination="q")) as claim:
            outcomes = {attempt.id: kinds[n % len(kinds)] for n, attempt in enumerate(claim.attempts)}
            assert await claim.settle(outcomes) == frozenset()
        assert len(await store.dead_letters.list()) == 10
        states = [stored.state for stored in await store.inspection.list_messages()]
        assert sorted(states) == ["queued"] * 20 + ["retrying"] * 10
        assert len(await claimed(store)) == 20  # of those given back, half are due only later

    async def test_settling_twice_writes_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            assert await claim.settle({attempt.id: RetryIn(LEASE, "x")}) == frozenset()
            assert await claim.settle({attempt.id: Done()}) == {attempt.id}
        assert len(await store.inspection.list_messages()) == 1

    async def test_a_part_of_a_claim_can_be_settled_before_the_rest(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message(), message())
        async with store.feed.claim(Selection(limit=2, lease=LEASE, destination="q")) as claim:
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
            assert await claimed(store) == []
        assert [attempt.id for attempt in await claimed(store)] == [claim.attempts[1].id]

    # Completion in the listener's transaction.

    async def test_a_completion_commits_with_the_listeners_transaction(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            async with engine.begin() as connection:
                assert await write(connection, store, *claim.completion(attempt)) == 1
            assert await claim.settle({attempt.id: Done(in_transaction=True)}) == frozenset()
        assert await store.inspection.list_messages() == []

    async def test_a_completion_rolls_back_with_the_listeners_transaction(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            async with engine.connect() as connection:
                assert await write(connection, store, *claim.completion(attempt)) == 1
                await connection.rollback()
            assert await claim.settle({attempt.id: RetryIn(timedelta(0), "x")}) == frozenset()
        assert len(await soon(lambda: claimed(store))) == 1

    async def test_a_failure_commits_with_the_transaction_in_which_it_was_written(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(), message())
        async with store.feed.claim(Selection(limit=2, lease=LEASE, destination="q")) as claim:
            first, second = claim.attempts
            retry, dead = RetryIn(timedelta(0), "x"), Dead(Reason.REJECTED, "y")
            async with engine.begin() as connection:
                assert await connection.run_sync(claim.conclude, first, retry)
                assert await connection.run_sync(claim.conclude, second, dead)
            written: dict[int, Outcome] = {
                first.id: replace(retry, in_transaction=True),
                second.id: replace(dead, in_transaction=True),
            }
            assert await claim.settle(written) == frozenset()
        [again] = await soon(lambda: claimed(store))
        assert (again.message.id, again.attempt_count) == (first.message.id, 2)
        assert [letter.reason for letter in await store.dead_letters.list()] == [Reason.REJECTED]

    async def test_a_failure_rolls_back_with_the_transaction_in_which_it_was_written(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            async with engine.connect() as connection:
                assert await connection.run_sync(claim.conclude, attempt, Dead(Reason.REJECTED, "x"))
                await connection.rollback()
            assert await claim.settle({attempt.id: Done()}) == frozenset()
        assert await store.dead_letters.list() == []

    async def test_a_failure_is_not_written_once_the_lease_was_lost(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            assert await claim.settle({attempt.id: Released()}) == frozenset()
            async with engine.begin() as connection:
                assert not await connection.run_sync(claim.conclude, attempt, Dead(Reason.REJECTED, "x"))
                assert not await connection.run_sync(claim.conclude, attempt, RetryIn(timedelta(0), "x"))

    async def test_many_are_completed_at_once_in_the_listeners_transaction(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, *(message() for _ in range(6)))
        async with (
            store.feed.claim(Selection(limit=2, lease=LEASE, destination="q")) as one,
            store.feed.claim(Selection(limit=3, lease=LEASE, destination="q")) as other,
        ):
            leases = [claim.lease_on(attempt) for claim in (one, other) for attempt in claim.attempts]
            async with engine.connect() as connection:
                assert await connection.run_sync(store.queues.complete, leases) == {lease.id for lease in leases}
                await connection.rollback()
            async with engine.begin() as connection:
                assert await connection.run_sync(store.queues.complete, leases[1:]) == {
                    lease.id for lease in leases[1:]
                }
                assert await connection.run_sync(store.queues.complete, leases) == {
                    leases[0].id
                }  # the others are completed
            for claim in (one, other):
                done = {attempt.id: Done(in_transaction=True) for attempt in claim.attempts}
                assert await claim.settle(done) == frozenset()
        assert len(await store.inspection.list_messages()) == 1

    async def test_a_completion_counts_once(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            [attempt] = claim.attempts
            async with engine.begin() as connection:
                assert await write(connection, store, *claim.completion(attempt)) == 1
                assert await write(connection, store, *claim.completion(attempt)) == 0
            await claim.settle({attempt.id: Done(in_transaction=True)})

    async def test_a_completion_keeps_the_message_if_it_is_told_to(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=NEVER)
        await queued(engine, store, message())
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            async with engine.begin() as connection:
                assert await write(connection, store, *claim.completion(claim.attempts[0])) == 1
            await claim.settle({claim.attempts[0].id: Done(in_transaction=True)})
        [stored] = await store.inspection.list_messages()
        assert stored.state == "handled"

    async def test_many_that_are_completed_are_kept_if_it_is_told_to(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        store = make_store(clean_up_after=NEVER)
        await queued(engine, store, message(), message())
        async with store.feed.claim(Selection(limit=2, lease=LEASE, destination="q")) as claim:
            leases = [claim.lease_on(attempt) for attempt in claim.attempts]
            async with engine.begin() as connection:
                assert await connection.run_sync(store.queues.complete, leases) == {lease.id for lease in leases}
            await claim.settle({attempt.id: Done(in_transaction=True) for attempt in claim.attempts})
        assert {stored.state for stored in await store.inspection.list_messages()} == {"handled"}


async def _both(store: Store) -> list[Attempt]:
    found = await claimed(store)
    return found if len(found) == 2 else []
