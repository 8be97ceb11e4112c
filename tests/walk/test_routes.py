"""Several destinations: each gets its own copies, and each has its own progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from outbox import ConfigurationError, Message, Outbox, RetryPolicy, TransportMismatch, TransportUnavailable, listen
from outbox.core.binding import Binding
from outbox.core.diagnosis import Level
from outbox.core.events import Advised, CircuitOpened, Relayed
from outbox.core.store import CircuitState
from outbox.core.transport import Published
from outbox.doctor import examine
from outbox.outbound import circuit
from outbox.outbound.publishing import Publisher
from outbox.testing import drain
from tests.support.commands import Command
from tests.support.observing import PATIENCE, Recorder, eventually
from tests.support.outboxes import MakeOutbox
from tests.walk.destinations import Sink, nothing, yes


class Named(Sink):
    """A sink that says what its route is called."""

    def __init__(self, route: str, answer: Any = yes) -> None:
        super().__init__(answer)
        self.route = route

    @property
    def bodies(self) -> list[Any]:
        return sorted(json.loads(message.body) for call in self.calls for message in call)


async def emit(outbox: Outbox, routing_key: str, *bodies: object, **options: Any) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, routing_key, bodies, **options)


async def empty(outbox: Outbox) -> None:
    async with asyncio.timeout(PATIENCE):
        while await outbox.messages():
            await asyncio.sleep(0.02)


async def test_every_destination_with_a_matching_key_gets_one_copy(make_outbox: MakeOutbox) -> None:
    orders, audit, users = Named("orders"), Named("audit"), Named("users")
    routes = {"order.*": orders, "#": audit, "order.created": orders, "user.*": users}
    outbox = make_outbox(routes=routes)
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", 1)
        await emit(outbox, "user.created", 2)
        await emit(outbox, "other", 3)
        await eventually(lambda: len(audit.calls) and audit.bodies == [1, 2, 3])
        await empty(outbox)
    assert (orders.bodies, users.bodies) == ([1], [2])


async def test_a_relay_binds_all_its_routes_when_it_starts(make_outbox: MakeOutbox) -> None:
    one, other = Named("one"), Named("other")
    outbox = make_outbox(routes={"#": one, "order.*": other, "user.*": other})
    async with outbox.running(relay=True):
        assert await outbox.bindings() == [Binding("one", "#"), Binding("other", "order.*"), Binding("other", "user.*")]


async def test_the_relay_of_a_route_takes_what_was_routed_to_it_and_nothing_else(make_outbox: MakeOutbox) -> None:
    outbox, sink = make_outbox(), Named("one")
    publisher = Publisher(
        outbox.store.feed,
        sink,
        batch_size=10,
        lease=timedelta(minutes=1),
        retry_policy=RetryPolicy.sequence(()),
        observe=Recorder(),
        destination="one",
    )
    await outbox.store.queues.bind([Binding("one", "order.*"), Binding("other", "#")])
    await emit(outbox, "order.created", 1)
    assert await publisher.round() == 0
    await outbox.store.queues.route(10, {})
    await emit(outbox, "order.created", 2)
    assert await publisher.round() == 1
    assert sink.bodies == [1]
    assert [stored.queue for stored in await outbox.messages()] == ["other", None]


async def test_a_destination_that_is_away_delays_nobody_else(make_outbox: MakeOutbox) -> None:
    dead, alive = Named("dead", nothing), Named("alive")
    recorder = Recorder()
    outbox = make_outbox(routes={"#": dead, "order.*": alive}, observers=[recorder], batch_size=5)
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", *range(50))
        await recorder.wait_for(Relayed, 50)  # and the rows are gone
        await recorder.wait_for(CircuitOpened)
        assert alive.bodies == list(range(50))
        backlog = await outbox.backlog()
        [found] = backlog.circuits
        assert (found.destination, found.state in (CircuitState.OPEN, CircuitState.PROBING)) == ("dead", True)
        assert [(queue.queue, queue.queued) for queue in backlog.queues] == [("alive", 0), ("dead", 50)]
    assert {event.destination for event in recorder.of(Relayed)} == {"alive"}


async def test_a_destination_that_hangs_delays_nobody_else(make_outbox: MakeOutbox) -> None:
    async def hang(messages: Sequence[Message]) -> Published:
        await asyncio.sleep(3600)
        raise AssertionError

    hanging, alive = Named("hanging", hang), Named("alive")
    outbox = make_outbox(routes={"#": hanging, "order.*": alive}, grace=0)
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", *range(10))
        await eventually(lambda: alive.bodies == list(range(10)))


async def test_each_destination_has_its_own_attempts_and_dead_letters(make_outbox: MakeOutbox) -> None:
    sent: list[bytes] = []

    async def billing(message: Message) -> None:
        raise ConnectionError("not now")

    async def shipping(message: Message) -> None:
        sent.append(message.body)

    outbox = make_outbox(routes={"order.#": billing, "#": shipping}, relay_retry_delays=(0.01,))
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", 1)
        await empty(outbox)
    [letter] = await outbox.dead_letters.list()
    assert (letter.queue, letter.reason, letter.attempt_count) == ("billing", "exhausted", 2)
    assert sent == [b"1"]
    await outbox.dead_letters.replay([letter.id])
    assert [stored.queue for stored in await outbox.messages()] == ["billing"]


async def test_what_no_route_matches_waits_for_one(make_outbox: MakeOutbox) -> None:
    users, orders = Named("users"), Named("orders")
    outbox = make_outbox(routes={"user.*": users})
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", 1)
        await eventually(lambda: _unroutable(outbox))
    later = make_outbox(routes={"user.*": users, "order.*": orders})
    async with later.running(relay=True):
        await eventually(lambda: orders.calls and orders.bodies == [1])


async def _unroutable(outbox: Outbox) -> int:
    return (await outbox.backlog()).unroutable


async def test_a_relay_of_the_version_before_makes_copies_for_a_new_route(make_outbox: MakeOutbox) -> None:
    one, other = Named("one"), Named("other")
    old, new = make_outbox(routes={"#": one}), make_outbox(routes={"#": one, "order.*": other})
    async with old.running(relay=True):
        await emit(old, "order.created", 1)
        await eventually(lambda: one.calls and one.bodies == [1])
        async with new.running(relay=True):
            pass
        await emit(old, "order.created", 2)
        await eventually(lambda: one.bodies == [1, 2])
        [stored] = await eventually(old.messages)
    assert (stored.queue, stored.message.body) == ("other", b"2")


async def test_a_route_that_is_gone_is_named_when_a_relay_starts_and_can_be_removed(
    make_outbox: MakeOutbox, command: Command
) -> None:
    one, other = Named("one"), Named("other", nothing)
    async with make_outbox(routes={"#": one, "order.*": other, "user.*": other}).running(relay=True):
        pass
    recorder = Recorder()
    outbox = make_outbox(routes={"#": one}, observers=[recorder])
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", 1)
        await eventually(lambda: one.calls and one.bodies == [1])
    [advised] = recorder.of(Advised)
    assert "other gets copies of order.*, user.*" in advised.advice
    assert "outbox queues remove other" in advised.advice
    [found] = [finding for finding in await examine(outbox) if finding.subject == "bindings"]
    assert (found.level, "other gets copies of order.*, user.*" in found.what) == (Level.WARNING, True)
    assert found.advice == "run: outbox queues remove other"
    shown = (await command.run("status", "--json", "--interval", "0")).document
    assert [(queue["queue"], queue["queued"]) for queue in shown["queues"]] == [("one", 0), ("other", 1)]
    assert "removed 2 bindings of other" in (await command.run("queues", "remove", "other")).said
    assert await outbox.bindings() == [Binding("one", "#")]
    recorder.events.clear()
    async with outbox.running(relay=True):
        pass
    assert recorder.of(Advised) == []


async def test_a_key_that_a_route_had_before_is_removed_while_no_relay_runs(
    make_outbox: MakeOutbox, command: Command
) -> None:
    one, other = Named("one"), Named("other")
    async with make_outbox(routes={"order.*": one, "#": other}).running(relay=True):
        pass
    recorder = Recorder()
    outbox = make_outbox(routes={"order.#": one, "#": other}, observers=[recorder])
    async with outbox.running(relay=True):
        pass
    [advised] = recorder.of(Advised)
    assert "one gets copies of order.*" in advised.advice
    assert "stop all relays, run: outbox queues remove one, and start them" in advised.advice
    await command.run("queues", "remove", "one")
    await emit(outbox, "order.created", 1)
    async with outbox.running(relay=True):
        await eventually(lambda: one.calls and one.bodies == [1])
    assert Binding("one", "order.*") not in await outbox.bindings()


async def test_status_names_a_destination_that_does_not_answer(
    make_outbox: MakeOutbox, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "SHORTEST", 60.0)

    def refused(messages: Sequence[Message]) -> Published:
        raise TransportUnavailable("connection refused")

    recorder = Recorder()
    outbox = make_outbox(routes={"#": Named("billing", refused)}, observers=[recorder])
    async with outbox.running(relay=True):
        await emit(outbox, "order.created", 1)
        await recorder.wait_for(CircuitOpened)
    said = (await command.run("status", "--interval", "0")).said
    assert "billing: open for" in said
    assert "no answer 1 time: connection refused" in said
    [found] = (await command.run("status", "--json", "--interval", "0")).document["circuits"]
    assert (found["destination"], found["state"], found["failures"]) == ("billing", "open", 1)


async def test_everything_can_be_drained(make_outbox: MakeOutbox) -> None:
    one, other = Named("one"), Named("other")
    outbox = make_outbox(routes={"#": one, "order.*": other})
    await emit(outbox, "order.created", 1, 2)
    await emit(outbox, "user.created", 3)
    drained = await drain(outbox)
    assert (drained.sent, drained.left) == (5, 0)
    assert (one.bodies, other.bodies) == ([1, 2, 3], [1, 2])


async def test_the_table_belongs_to_routes(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(routes={"#": Named("one")})
    async with outbox.running(relay=True):
        pass
    assert await outbox.store.maintenance.recorded_transport() == "routes"
    with pytest.raises(TransportMismatch, match="routes"):
        async with make_outbox(transport=Named("one")).running(relay=True):
            pass


async def test_a_worker_cannot_take_from_routes(make_outbox: MakeOutbox) -> None:
    @listen("#", queue="q")
    async def listener(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="only publish"):
        async with make_outbox(routes={"#": Named("one")}).running(listeners=[listener]):
            pass
