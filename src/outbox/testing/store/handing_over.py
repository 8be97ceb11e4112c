"""HandingOverCases: routed messages that a worker beside the router takes at once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import Schedule
from outbox.core.store import Store, Wanted
from outbox.testing.store.cases import LEASE, RENEWED, SHORT, StoreCases, claimed, emit, message, renewed, soon


class HandingOverCases(StoreCases):
    """Routed messages that a worker beside the router takes at once."""

    async def test_what_is_wanted_is_leased_by_the_routing_itself(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        sent = message("order.created", b"1", headers={"h": "v"}, key="k", tracking_ids=("x", "y"))
        await emit(engine, store, sent)
        routing = await store.queues.route(100, {}, {"q": Wanted(10, LEASE)})
        assert (routing.taken, dict(routing.routed), set(routing.claims)) == (1, {"q": 1}, {"q"})
        async with routing.claims["q"] as claim:
            [attempt] = claim.attempts
            assert (attempt.message, attempt.attempt_count, attempt.crash_count) == (sent, 1, 0)
            assert await claimed(store) == []
            assert await claim.settle({attempt.id: Done()}) == frozenset()
        assert await store.inspection.find(sent.id) == []

    async def test_no_more_is_leased_than_is_wanted_and_the_rest_lies_in_its_queue(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "order"), Binding("other", "user")])
        await emit(engine, store, *(message("order") for _ in range(5)), message("user"))
        routing = await store.queues.route(100, {}, {"q": Wanted(2, LEASE)})
        assert dict(routing.routed) == {"q": 5, "other": 1}
        async with routing.claims["q"] as claim:
            assert len(claim.attempts) == 2
            assert len(await claimed(store)) == 3
            assert len(await claimed(store, destination="other")) == 1

    async def test_the_oldest_are_handed_over_in_their_order(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        for body in (b"1", b"2", b"3"):
            await emit(engine, store, message(body=body))
        routing = await store.queues.route(100, {}, {"q": Wanted(2, LEASE)})
        async with routing.claims["q"] as claim:
            assert [attempt.message.body for attempt in claim.attempts] == [b"1", b"2"]

    async def test_other_queues_get_their_copies_of_what_is_handed_over(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("a", "#"), Binding("b", "#"), Binding("c", "#")])
        sent = message()
        await emit(engine, store, sent)
        routing = await store.queues.route(100, {}, {"b": Wanted(10, LEASE)})
        async with routing.claims["b"] as claim:
            assert await claim.settle({claim.attempts[0].id: RetryIn(timedelta(0), "x")}) == frozenset()
        for queue, attempt_count in (("a", 1), ("b", 2), ("c", 1)):
            [attempt] = await soon(lambda: claimed(store, destination=queue))  # noqa: B023
            assert (attempt.message, attempt.attempt_count) == (sent, attempt_count)

    async def test_what_is_not_settled_is_given_back_when_the_claim_closes(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message())
        routing = await store.queues.route(100, {}, {"q": Wanted(10, LEASE)})
        async with routing.claims["q"]:
            pass
        [attempt] = await claimed(store)
        assert (attempt.attempt_count, attempt.crash_count) == (1, 0)

    async def test_what_was_handed_over_to_a_process_that_died_comes_back_as_a_crash(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message())
        await store.queues.route(100, {}, {"q": Wanted(10, SHORT)})  # the claim is not entered, so it is not renewed
        [attempt] = await soon(lambda: claimed(store))
        assert (attempt.attempt_count, attempt.crash_count) == (1, 1)

    async def test_a_lease_that_was_handed_over_and_lost_writes_nothing(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message())
        routing = await store.queues.route(100, {}, {"q": Wanted(10, SHORT)})
        leased = routing.claims["q"]
        await soon(lambda: claimed(store))
        id = leased.attempts[0].id
        for outcome in (Done(), RetryIn(timedelta(0), "late"), Dead(Reason.REJECTED, "late")):
            assert await leased.settle({id: outcome}) == {id}
        assert len(await claimed(store)) == 1

    async def test_a_handed_over_claim_is_renewed_while_it_is_open(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message())
        routing = await store.queues.route(100, {}, {"q": Wanted(10, RENEWED)})
        async with routing.claims["q"] as claim:
            await renewed(store)
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()

    async def test_an_expired_message_is_not_handed_over_but_buried(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, message(), schedule=Schedule(expiration=timedelta(milliseconds=1)))
        await asyncio.sleep(0.05)
        routing = await store.queues.route(100, {}, {"q": Wanted(10, LEASE)})
        assert not routing.claims
        assert [letter.reason for letter in await store.dead_letters.list()] == [Reason.EXPIRED]
