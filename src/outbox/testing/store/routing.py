"""RoutingCases: bindings, destinations and the recorded transport."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import Schedule
from outbox.core.store import TRANSPORT, Store
from outbox.testing.store.cases import MakeStore, StoreCases, claimed, emit, message, queued, settled, soon


class RoutingCases(StoreCases):
    """Bindings, destinations and the recorded transport."""

    # Routing.

    async def test_a_message_goes_to_every_queue_that_is_bound_to_it(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("a", "order.*"), Binding("b", "#"), Binding("c", "user.#")])
        sent = message("order.created", b"1", headers={"h": "v"}, key="k", tracking_ids=("x", "y"))
        await emit(engine, store, sent)
        routing = await store.queues.route(100, {})
        assert (routing.taken, dict(routing.routed)) == (1, {"a": 1, "b": 1})
        for queue in ("a", "b"):
            assert [attempt.message for attempt in await claimed(store, destination=queue)] == [sent]
        assert await claimed(store, destination="c") == []
        assert (await store.queues.route(100, {})).taken == 0

    async def test_each_queue_has_its_own_attempts_and_dead_letters(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("a", "#"), Binding("b", "#"), Binding("c", "#")])
        await emit(engine, store, message())
        await store.queues.route(100, {})
        await settled(store, Done(), "a")
        await settled(store, Dead(Reason.REJECTED, "x"), "b")
        await settled(store, RetryIn(timedelta(0), "x"), "c")
        assert [letter.queue for letter in await store.dead_letters.list()] == ["b"]
        [attempt] = await soon(lambda: claimed(store, destination="c"))
        assert attempt.attempt_count == 2

    async def test_two_bindings_of_one_queue_bring_the_message_once(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "order.*"), Binding("q", "#.created")])
        await emit(engine, store, message("order.created"))
        assert dict((await store.queues.route(100, {})).routed) == {"q": 1}
        assert len(await claimed(store)) == 1

    async def test_a_message_nobody_is_bound_to_waits_out_of_the_way(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message("lonely"))
        [before] = await store.inspection.list_messages()
        routing = await store.queues.route(100, {})
        assert dict(routing.unroutable) == {"lonely": 1}
        backlog = await store.inspection.backlog()
        assert (backlog.unroutable, backlog.waiting) == (1, 0)
        [stored] = await store.inspection.list_messages()
        assert stored.state == "unroutable"
        assert stored.due_at - before.due_at >= timedelta(seconds=1)

    async def test_an_unroutable_message_is_looked_at_again_by_itself(self, engine: AsyncEngine, store: Store) -> None:
        await emit(engine, store, message("lonely"))
        await store.queues.route(100, {})

        async def again() -> int:
            return (await store.queues.route(100, {})).taken

        assert await soon(again) == 1

    async def test_a_new_binding_brings_the_messages_that_waited_for_it(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await emit(engine, store, *(message("lonely") for _ in range(5)))
        await store.queues.route(100, {})
        await store.queues.bind([Binding("q", "lonely")])
        assert dict((await store.queues.route(100, {})).routed) == {"q": 5}
        assert (await store.inspection.backlog()).unroutable == 0
        [attempt, *_] = await claimed(store)
        assert (attempt.attempt_count, attempt.crash_count) == (1, 0)

    async def test_messages_nobody_needs_are_discarded(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "audit.important")])
        await emit(engine, store, message("audit.login"), message("audit.important"), message("other"))
        routing = await store.queues.route(100, {"audit.#": "discard"})
        assert (routing.discarded, dict(routing.unroutable), dict(routing.routed)) == (1, {"other": 1}, {"q": 1})
        assert {stored.message.routing_key for stored in await store.inspection.list_messages()} == {
            "audit.important",
            "other",
        }

    async def test_routing_takes_no_more_than_its_limit(self, engine: AsyncEngine, store: Store) -> None:
        await store.queues.bind([Binding("q", "#")])
        await emit(engine, store, *(message() for _ in range(5)))
        assert [(await store.queues.route(2, {})).taken for _ in range(4)] == [2, 2, 1, 0]

    async def test_many_routers_at_once_route_each_message_once(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].queues.bind([Binding("a", "#"), Binding("b", "#")])
        await emit(engine, stores[0], *(message(body=str(n).encode()) for n in range(200)))

        async def route(store: Store) -> None:
            while (await store.queues.route(20, {})).taken:
                pass

        await asyncio.gather(*map(route, stores))
        for queue in ("a", "b"):
            bodies = [attempt.message.body for attempt in await claimed(stores[0], 1000, queue)]
            assert len(bodies) == len(set(bodies)) == 200

    async def test_bindings_are_kept_listed_and_removed(self, store: Store, make_store: MakeStore) -> None:
        await store.queues.bind([Binding("b", "x"), Binding("a", "y"), Binding("a", "x")])
        await store.queues.bind([Binding("a", "x")])
        expected = [Binding("a", "x"), Binding("a", "y"), Binding("b", "x")]
        assert await make_store().queues.bindings() == expected
        assert await store.queues.unbind("b", "y") == 0
        assert await store.queues.unbind("a", "x") == 1
        assert await store.queues.bindings() == [Binding("a", "y"), Binding("b", "x")]
        await store.queues.bind([Binding("a", "x")])
        assert await store.queues.unbind("a") == 2
        assert await store.queues.unbind("a") == 0
        assert await store.queues.bindings() == [Binding("b", "x")]

    async def test_a_removed_binding_brings_nothing_more_and_keeps_what_lies_there(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message(body=b"1"))
        await store.queues.unbind("q")
        await emit(engine, store, message(body=b"2"))
        assert dict((await store.queues.route(100, {})).unroutable) == {"order.created": 1}
        assert [attempt.message.body for attempt in await claimed(store)] == [b"1"]

    async def test_a_router_notices_bindings_that_another_made(
        self, engine: AsyncEngine, make_store: MakeStore
    ) -> None:
        first, second = make_store(), make_store()
        await first.queues.bind([Binding("a", "#")])
        await emit(engine, first, message())
        await first.queues.route(10, {})
        await second.queues.bind([Binding("b", "#")])
        await emit(engine, first, message())
        assert dict((await first.queues.route(10, {})).routed) == {"a": 1, "b": 1}

    async def test_messages_can_be_delivered_straight_to_queues(self, store: Store) -> None:
        both, one, none = message(body=b"both"), message(body=b"one"), message(body=b"none")
        await store.queues.deliver([both, one, none], {both.id: ["a", "b"], one.id: ["a"], none.id: []})
        assert {attempt.message.body for attempt in await claimed(store, destination="a")} == {b"both", b"one"}
        assert {attempt.message.body for attempt in await claimed(store, destination="b")} == {b"both"}
        assert await claimed(store, destination=None) == []

    # The recorded transport.

    async def test_the_first_transport_is_recorded_and_kept(self, store: Store, make_store: MakeStore) -> None:
        assert await store.maintenance.record_transport("database") == "database"
        assert await make_store().maintenance.record_transport("rabbitmq") == "database"
        assert await store.maintenance.record_transport("rabbitmq", switch=True) == "rabbitmq"
        assert await store.maintenance.record_transport("database") == "rabbitmq"

    async def test_a_switch_of_transports_makes_everything_due_that_the_one_before_had_put_off(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message("routed"))
        await settled(store, RetryIn(timedelta(hours=1), "no"))
        await store.queues.unbind("q")
        await emit(engine, store, message("timer"), schedule=Schedule(due=timedelta(hours=1), timer_id="t"))
        await emit(engine, store, message("refused"))
        await settled(store, RetryIn(timedelta(hours=1), "no"), None)
        await emit(engine, store, *(message("lonely") for _ in range(3)))
        await store.queues.route(100, {})
        assert (await store.inspection.backlog()).unroutable == 3
        await store.maintenance.record_transport("database")
        assert await store.maintenance.record_transport("rabbitmq", switch=True) == "rabbitmq"
        backlog = await store.inspection.backlog()
        assert (backlog.waiting, backlog.due, backlog.unroutable) == (5, 4, 0)
        found = await claimed(store, destination=None)
        assert sorted(attempt.message.routing_key for attempt in found) == ["lonely", "lonely", "lonely", "refused"]
        assert {attempt.attempt_count for attempt in found} == {1}
        assert await claimed(store) == []

    async def test_a_queue_belongs_to_the_service_that_records_it_first_until_it_is_released(
        self, store: Store, make_store: MakeStore
    ) -> None:
        assert await store.owners.record({"a": "billing", "b": "billing"}) == {"a": "billing", "b": "billing"}
        assert await make_store().owners.record({"b": "mails", "c": "mails"}) == {"b": "billing", "c": "mails"}
        assert await store.owners.release("b") == "billing"
        assert await store.owners.release("b") is None
        assert await store.owners.record({"b": "mails"}) == {"b": "mails"}
        assert await store.owners.all() == {"a": "billing", "b": "mails", "c": "mails"}

    async def test_bindings_at_a_broker_are_recorded_and_neither_owned_nor_followed(
        self, store: Store, make_store: MakeStore
    ) -> None:
        long = Binding("q" * 255, "k" * 255)
        await store.owners.declare([Binding("q", "order.*"), long])
        await make_store().owners.declare([Binding("q", "order.*"), Binding("q", "order.created")])
        await store.owners.record({"q": "billing"})
        await store.owners.retract(Binding("q", "order.*"))
        await store.owners.retract(Binding("q", "unknown"))
        assert set(await store.owners.declared()) == {Binding("q", "order.created"), long}
        assert await store.owners.all() == {"q": "billing"}
        assert await store.queues.bindings() == []

    async def test_a_switch_of_the_transport_forgets_its_address(self, store: Store) -> None:
        await store.maintenance.record_transport("http")
        await store.owners.record({TRANSPORT: "https://example.com/", "q": "billing"})
        await store.maintenance.record_transport("rabbitmq", switch=True)
        assert await store.owners.all() == {"q": "billing"}

    async def test_of_many_first_transports_one_wins(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        await stores[0].maintenance.create_tables()
        names = await asyncio.gather(*(store.maintenance.record_transport(f"t{n}") for n, store in enumerate(stores)))
        assert len(set(names)) == 1
