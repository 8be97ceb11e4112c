"""ClaimingCases: who holds a message, for how long, and who is fenced."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Done, Released, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import NOW
from outbox.core.store import Selection, Store, Suspected
from outbox.testing.store.cases import (
    LEASE,
    OUTCOMES,
    RENEWED,
    MakeStore,
    StoreCases,
    claimed,
    emit,
    message,
    queued,
    renewed,
    settled,
    soon,
    write,
)


class ClaimingCases(StoreCases):
    """Who holds a message, for how long, and who is fenced."""

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
                *(
                    stack.enter_async_context(store.feed.claim(Selection(limit=30, lease=LEASE, destination="q")))
                    for store in stores
                )
            )
            ids = [attempt.id for claim in claims for attempt in claim.attempts]
            assert len(ids) == len(set(ids)) == 100

    async def test_a_claim_sees_only_its_destination(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("a", "a"), Binding("b", "b")])
        await emit(engine, store, message("a"), message("b"), message("c"))
        await store.queues.route(100, {})
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
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")):
                raise RuntimeError
        assert len(await claimed(store)) == 1

    async def test_a_claim_that_is_cancelled_gives_everything_back(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        taken = asyncio.Event()

        async def hold() -> None:
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")):
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
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")):
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
        async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
            assert await claim.settle({}) == frozenset()

    async def test_a_message_committed_late_is_delivered_late_not_lost(self, engine: AsyncEngine, store: Store) -> None:
        """Nothing is skipped: no position over ids or times."""
        async with engine.connect() as late:
            await write(late, store, *store.writing.insert([message(body=b"late")], NOW))
            assert await claimed(store, destination=None) == []
            await late.commit()
        assert (await settled(store, Done(), None)).message.body == b"late"

    async def test_a_message_committed_late_holds_up_no_other_and_is_not_passed_by(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        if not self.writes_side_by_side:
            pytest.skip("writes_side_by_side=False: one transaction writes after the other")
        async with engine.connect() as late:
            await write(late, store, *store.writing.insert([message(body=b"late")], NOW))
            await emit(engine, store, message(body=b"early"))
            assert (await settled(store, Done(), None)).message.body == b"early"
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
        async with store.feed.claim(Selection(limit=1, lease=RENEWED, destination="q")) as claim:
            await renewed(store)
            assert await claimed(store) == []
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()

    async def test_a_lease_that_is_renewed_once_lasts_longer_and_is_not_renewed_before_it_shall_be(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(), message())

        async def leases() -> list[datetime]:
            stored = sorted(await store.inspection.list_messages(), key=lambda each: each.row_id)
            return [each.leased_until for each in stored if each.leased_until is not None]

        async with store.feed.claim(Selection(limit=2, lease=timedelta(seconds=2), destination="q")) as claim:
            first, second = await leases()
            longer = [min(attempt.id for attempt in claim.attempts)]
            await claim.renew_once(longer, timedelta(seconds=30))
            once = (await leases())[0]
            assert once - first > timedelta(seconds=25)

            async def other_was_renewed() -> bool:
                return (await leases())[1] > second

            await soon(other_was_renewed)
            assert (await leases())[0] == once
            claim.renew_again(longer)

            async def with_the_others() -> bool:
                return (await leases())[0] < once

            await soon(with_the_others)

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
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as current:
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
                assert await write(connection, store, *late.completion(attempt)) == 0
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as current:
                async with engine.begin() as connection:
                    assert await write(connection, store, *late.completion(attempt)) == 0
                assert await current.settle({attempt.id: Done()}) == frozenset()

    async def test_of_many_that_are_completed_at_once_the_late_ones_are_not(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(), message())
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")))
            late = await self.expired(stack, store)
            leases = [claim.lease_on(attempt) for claim in (own, late) for attempt in claim.attempts]
            async with engine.connect() as connection:
                assert await connection.run_sync(store.queues.complete, leases) == {own.attempts[0].id}
                await connection.rollback()
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as current:
                async with engine.begin() as connection:
                    assert await connection.run_sync(store.queues.complete, leases) == {own.attempts[0].id}
                assert await current.settle({current.attempts[0].id: Done()}) == frozenset()
            await own.settle({own.attempts[0].id: Done(in_transaction=True)})
        assert await store.inspection.list_messages() == []

    async def test_a_lease_that_expired_is_not_renewed(self, engine: AsyncEngine, store: Store) -> None:
        """A holder that slept through its lease must not extend it when it wakes up."""
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            claim = await self.expired(stack, store)
            await claim.renew_once({attempt.id for attempt in claim.attempts}, LEASE)
            assert len(await claimed(store)) == 1

    async def test_of_messages_whose_last_start_never_ended_one_is_claimed_with_all_others(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(3)))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, *(message(body=b"fresh") for _ in range(2)))
            async with store.feed.claim(
                Selection(limit=100, lease=LEASE, destination="q", suspected=Suspected.ONE)
            ) as claim:
                assert [attempt.message.body for attempt in claim.attempts] == [b"0", b"fresh", b"fresh"]
                assert [attempt.crash_count for attempt in claim.attempts] == [1, 0, 0]
            async with store.feed.claim(
                Selection(limit=2, lease=LEASE, destination="q", suspected=Suspected.ONE)
            ) as claim:
                assert [attempt.message.body for attempt in claim.attempts] == [b"0"]

    async def test_suspected_messages_are_passed_over_by_a_claim_that_wants_none(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(body=b"suspected"), message(body=b"suspected"))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, message(body=b"fresh"))
            async with store.feed.claim(
                Selection(limit=1, lease=LEASE, destination="q", suspected=Suspected.NONE)
            ) as claim:
                assert [attempt.message.body for attempt in claim.attempts] == [b"fresh"]

    async def test_a_relay_claims_suspected_messages_with_all_others_in_order(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(3)))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, message(body=b"fresh"), message(body=b"too many"))
            assert [attempt.message.body for attempt in await claimed(store, 4)] == [b"0", b"1", b"2", b"fresh"]

    async def test_the_start_of_an_isolated_attempt_is_counted_when_it_is_started(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(body=b"suspected"))
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            await queued(engine, store, message(body=b"fresh"))
            for _ in range(2):  # its process dies while it waits to be alone
                waiting = await self.expired(stack, store, isolated_at=1)
                [attempt] = [each for each in waiting.attempts if each.message.body == b"suspected"]
                assert (attempt.crash_count, attempt.isolated) == (1, True)
                assert not await waiting.start(attempt)
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q", isolated_at=1)) as claim:
                [attempt] = claim.attempts
                assert (attempt.crash_count, attempt.isolated) == (1, True)
                await claim.settle({attempt.id: Released()})
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q", isolated_at=1)) as claim:
                assert await claim.start(claim.attempts[0])
                assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()
            assert [attempt.message.body for attempt in await claimed(store)] == [b"fresh"]

    async def test_an_isolated_attempt_that_was_started_and_never_ended_is_a_crash(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            claim = await stack.enter_async_context(
                store.feed.claim(Selection(limit=1, lease=timedelta(seconds=1), destination="q", isolated_at=1))
            )
            assert await claim.start(claim.attempts[0])
            await self.crash(claim)
            await asyncio.sleep(1.05)
            [attempt] = await claimed(store)
            assert (attempt.crash_count, attempt.isolated) == (2, False)

    async def test_an_isolated_attempt_that_cannot_be_made_now_is_due_later_and_counts_as_no_start(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q", isolated_at=1)) as claim:
                await claim.settle({claim.attempts[0].id: Released(timedelta(hours=1))})
            assert await claimed(store) == []
            [stored] = await store.inspection.list_messages()
            assert (stored.crash_count, stored.leased_until) == (1, None)

    async def test_crashes_are_counted_apart_from_attempts(self, engine: AsyncEngine, store: Store) -> None:
        await queued(engine, store, message())
        async with AsyncExitStack() as stack:
            await self.expired(stack, store)
            attempt = await settled(store, RetryIn(timedelta(0), "failed"))
            assert (attempt.attempt_count, attempt.crash_count) == (1, 1)
            await self.expired(stack, store)
            attempt = await settled(store, Released())
            assert (attempt.attempt_count, attempt.crash_count) == (2, 2)
