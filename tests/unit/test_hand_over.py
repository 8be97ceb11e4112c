"""Hand-over: a router beside a worker routes what the worker's queues want, and holds back while they want nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from outbox import listen
from outbox.core.events import Event, Recovered, Troubled
from outbox.core.store import Routing, Wanted
from outbox.outbound.relay import Relay, Router
from outbox.transports.database import DatabaseTransport

LEASE = timedelta(seconds=60)


class Store:
    """Notes what a router asks of it."""

    dead_letters = None

    def __init__(self, *routings: Routing) -> None:
        self.routings = list(routings)
        self.asked: list[tuple[int, Mapping[str, Wanted]]] = []
        self.announced: list[str | None] = []
        self.waits: list[float] = []
        self.queues = self.feed = self

    async def route(self, limit: int, unroutable: object, wanted: Mapping[str, Wanted]) -> Routing:
        self.asked.append((limit, dict(wanted)))
        return self.routings.pop(0) if self.routings else Routing()

    def announce(self, *destinations: str | None) -> None:
        self.announced += destinations

    async def wait(self, longest: float) -> None:
        self.waits.append(longest)


class Takers:
    """A worker that wants what a test says."""

    def __init__(self, **wanted: int) -> None:
        self.consuming = True
        self.wanted = {queue: Wanted(limit, LEASE) for queue, limit in wanted.items()}
        self.taken: list[str] = []
        self.waits: list[float] = []

    @contextmanager
    def offer(self) -> Iterator[Any]:
        yield self

    def take(self, queue: str, claim: Any) -> int:
        self.taken.append(queue)
        return len(claim.attempts)

    async def room(self, longest: float) -> None:
        self.waits.append(longest)
        await asyncio.sleep(0)


def router(store: Store, takers: Takers, patience: float = 1.0) -> Router:
    events: list[Event] = []
    return Router(
        store,  # type: ignore[arg-type]
        takers,
        batch_size=500,
        patience=patience,
        unroutable={},
        observe=events.append,
    )


async def test_a_router_beside_a_worker_routes_no_more_than_the_worker_wants() -> None:
    store, takers = Store(), Takers(a=10, b=30)
    await router(store, takers).round()
    assert store.asked == [(40, takers.wanted)]


async def test_a_worker_that_wants_more_than_a_batch_gets_a_batch() -> None:
    store = Store()
    await router(store, Takers(a=1000)).round()
    assert [limit for limit, _ in store.asked] == [500]


async def test_a_router_without_a_worker_routes_whole_batches() -> None:
    store, takers = Store(), Takers()
    takers.consuming = False
    await router(store, takers).round()
    assert store.asked == [(500, {})]


async def test_what_was_leased_is_handed_over_and_only_the_rest_is_announced() -> None:
    claim: Any = SimpleNamespace(attempts=[1, 2])
    routing = Routing(5, {"a": 2, "b": 2, "c": 1}, claims={"a": claim, "b": SimpleNamespace(attempts=[3])})
    store, takers = Store(routing), Takers(a=2, b=1)
    assert await router(store, takers).round() == 5
    assert takers.taken == ["a", "b"]
    assert store.announced == ["b", "c"]


async def test_while_nobody_wants_anything_the_router_waits_for_room_and_not_for_messages() -> None:
    store, takers = Store(), Takers()
    holding_back = router(store, takers)
    assert await holding_back.round() == 0
    await holding_back.wait(0.5)
    assert (store.asked, store.waits, takers.waits) == ([], [], [0.5])
    takers.wanted = {"a": Wanted(1, LEASE)}
    await holding_back.round()
    await holding_back.wait(0.5)
    assert ([limit for limit, _ in store.asked], store.waits, takers.waits) == ([1], [0.5], [0.5])


async def test_a_router_does_not_hold_back_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store, takers = Store(), Takers()
    holding_back = router(store, takers, patience=1.0)
    await holding_back.round()
    now = 100.9
    await holding_back.round()
    assert store.asked == []
    now = 101.0
    await holding_back.round()
    assert store.asked == [(500, {})]


async def test_a_router_that_holds_back_does_not_say_that_the_database_answers() -> None:
    stop, takers, events = asyncio.Event(), Takers(a=1), list[Event]()

    class Away(Store):
        async def route(self, limit: int, unroutable: object, wanted: Mapping[str, Wanted]) -> Routing:
            self.asked.append((limit, wanted))
            takers.wanted = {}  # its outcomes cannot be written, so the queue takes no more
            if len(self.asked) < 3:
                raise OSError("away")
            stop.set()
            return Routing()

    store = Away()
    holding_back = router(store, takers, patience=0.05)
    relay = Relay(holding_back, wait=holding_back.wait, poll_interval=0.02, observe=events.append, name="relay")
    await asyncio.wait_for(relay.run(stop), 30)
    assert [type(event) for event in events] == [Troubled, Troubled, Recovered]
    assert [event.pause for event in events if isinstance(event, Troubled)] == [
        timedelta(seconds=0.2),
        timedelta(seconds=0.4),
    ]
    assert takers.waits, "it held back in between"


async def test_room_that_comes_about_before_somebody_waits_for_it_is_not_missed() -> None:
    transport = DatabaseTransport(Store(), lease=LEASE, poll_interval=1.0, observe=print)  # type: ignore[arg-type]

    @listen("order.created", queue="orders")
    async def orders(order: str) -> None: ...

    deliveries = transport.consume(orders, 10)
    assert transport.consuming
    with transport.offer() as offer:
        assert offer.wanted == {}  # it has not looked into its queue yet
    transport._changed.set()
    async with asyncio.timeout(30):
        await transport.room(60)
    await deliveries.aclose()
    assert not transport.consuming
