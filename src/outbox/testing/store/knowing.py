"""KnowingCases: a router that has met a routing key before may route it by a shorter way, to the same end."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import Schedule
from outbox.core.store import Routing, Store, Wanted
from outbox.testing.store.cases import (
    LEASE,
    RENEWED,
    SHORT,
    MakeStore,
    StoreCases,
    claimed,
    emit,
    message,
    renewed,
    soon,
)

KEYS = ("order", "user")


async def routed(store: Store, lease: timedelta = LEASE, **wanted: int) -> Routing:
    """What a round routes while so much is wanted from each queue."""
    return await store.queues.route(100, {}, {queue: Wanted(limit, lease) for queue, limit in wanted.items()})


class KnowingCases(StoreCases):
    """Messages whose routing keys the router knows: `order` goes to `orders`, `user` to `users`."""

    async def acquainted(self, engine: AsyncEngine, store: Store, *further: Binding) -> None:
        await store.queues.bind([Binding("orders", "order"), Binding("users", "user"), *further])
        await emit(engine, store, *(message(key) for key in KEYS))
        routing = await routed(store, orders=1, users=1)
        for claim in routing.claims.values():
            async with claim:
                assert not await claim.settle({attempt.id: Done() for attempt in claim.attempts})

    async def test_known_messages_come_whole_and_in_their_order(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        sent = [
            message("order", b"1", headers={"h": "v"}, key="k", tracking_ids=("x", "y"), content_type="text/plain"),
            message("order", b"2"),
            message("order", b""),
        ]
        for each in sent:
            await emit(engine, store, each)
        routing = await routed(store, orders=10)
        assert (routing.taken, dict(routing.routed), set(routing.claims)) == (3, {"orders": 3}, {"orders"})
        async with routing.claims["orders"] as claim:
            assert [attempt.message for attempt in claim.attempts] == sent
            assert {(attempt.attempt_count, attempt.crash_count) for attempt in claim.attempts} == {(1, 0)}
            assert await claimed(store, destination="orders") == []
            assert not await claim.settle({attempt.id: Done() for attempt in claim.attempts})
        assert (await store.inspection.backlog()).waiting == 0

    async def test_each_queue_gets_its_own_and_no_more_than_it_wants(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, *(message(key) for key in KEYS * 4))
        routing = await routed(store, orders=3, users=1)
        assert dict(routing.routed) == {"orders": 4, "users": 4}
        orders, users = routing.claims["orders"], routing.claims["users"]
        async with orders, users:
            assert [attempt.message.routing_key for attempt in orders.attempts] == ["order"] * 3
            assert [attempt.message.routing_key for attempt in users.attempts] == ["user"]
            assert len(await claimed(store, destination="orders")) == 1
            assert len(await claimed(store, destination="users")) == 3

    async def test_what_is_unknown_is_routed_in_the_same_round(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store, Binding("audit", "audit.#"))
        await emit(engine, store, message("order"), message("audit.x"), message("nobody"), message("order"))
        routing = await routed(store, orders=10)
        assert (routing.taken, dict(routing.routed)) == (4, {"orders": 2, "audit": 1})
        assert dict(routing.unroutable) == {"nobody": 1}
        async with routing.claims["orders"] as claim:
            assert len(claim.attempts) == 2
        assert len(await claimed(store, destination="audit")) == 1

    async def test_what_nobody_here_wants_is_routed_all_the_same(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, *(message(key) for key in KEYS))
        routing = await routed(store, orders=10)
        assert dict(routing.routed) == {"orders": 1, "users": 1}
        assert set(routing.claims) == {"orders"}
        assert len(await claimed(store, destination="users")) == 1

    async def test_a_queue_that_another_process_bound_meanwhile_gets_its_copy(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        await self.acquainted(engine, store)
        await make_store().queues.bind([Binding("audit", "#")])
        sent = message("order")
        await emit(engine, store, sent)
        routing = await routed(store, orders=10)
        async with routing.claims["orders"] as claim:
            assert [attempt.message for attempt in claim.attempts] == [sent]
        assert [attempt.message for attempt in await claimed(store, destination="audit")] == [sent]

    async def test_a_queue_that_another_process_unbound_meanwhile_gets_nothing(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        await self.acquainted(engine, store)
        await make_store().queues.unbind("orders")
        await emit(engine, store, message("order"))
        routing = await routed(store, orders=10)
        assert not routing.claims
        assert dict(routing.unroutable) == {"order": 1}
        assert await claimed(store, destination="orders") == []

    async def test_what_is_not_due_is_left_alone(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, message("order"), schedule=Schedule(due=timedelta(hours=1)))
        assert (await routed(store, orders=10)).taken == 0

    async def test_a_known_message_that_expired_is_buried(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, message("order"), schedule=Schedule(expiration=timedelta(milliseconds=1)))
        await asyncio.sleep(0.05)
        assert not (await routed(store, orders=10)).claims
        assert [letter.reason for letter in await store.dead_letters.list()] == [Reason.EXPIRED]

    async def test_a_known_message_is_handed_to_one_of_many_routers(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        stores = [store, make_store(), make_store()]
        for each in stores:
            await self.acquainted(engine, each)
        await emit(engine, store, *(message("order") for _ in range(50)))
        rounds = await asyncio.gather(*(routed(each, orders=20) for each in stores))
        ids = [attempt.id for each in rounds for claim in each.claims.values() for attempt in claim.attempts]
        assert len(ids) == len(set(ids))
        assert sum(each.taken for each in rounds) <= 50

    async def test_a_known_message_whose_process_died_comes_back_as_a_crash(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, message("order"))
        leased = (await routed(store, SHORT, orders=10)).claims["orders"]  # the claim is neither entered nor renewed
        [attempt] = await soon(lambda: claimed(store, destination="orders"))
        assert (attempt.attempt_count, attempt.crash_count) == (1, 1)
        for outcome in (Done(), RetryIn(timedelta(0), "late"), Dead(Reason.REJECTED, "late")):
            assert await leased.settle({attempt.id: outcome}) == {attempt.id}

    async def test_the_lease_on_a_known_message_is_renewed(self, engine: AsyncEngine, store: Store) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, message("order"))
        async with (await routed(store, RENEWED, orders=10)).claims["orders"] as claim:
            await renewed(store)
            assert await claim.settle({claim.attempts[0].id: Done()}) == frozenset()

    async def test_known_messages_of_a_round_that_was_cancelled_are_given_back(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await self.acquainted(engine, store)
        await emit(engine, store, message("order"))
        routing = asyncio.create_task(routed(store, orders=10))
        await asyncio.sleep(0)
        routing.cancel()
        await asyncio.wait([routing])
        again = await routed(store, orders=10)
        attempts = [attempt for claim in again.claims.values() for attempt in claim.attempts]
        attempts += [] if attempts else await claimed(store, destination="orders")
        assert [(attempt.attempt_count, attempt.crash_count) for attempt in attempts] == [(1, 0)]
