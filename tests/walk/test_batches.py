"""Listeners that take lists, on the databases at hand: one transaction for all, and one message spoils no other."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Listener, Message, Outbox, Reason, Reject, listen
from outbox.core.attempt import Done, Released, RetryIn
from outbox.core.events import Handled, LeaseWasLost, Troubled
from outbox.inbound import inbox
from outbox.testing import drain
from tests.support.observing import PATIENCE, Recorder, Statements, eventually
from tests.support.outboxes import MakeOutbox

LONG_LEASE = timedelta(minutes=5)
LIMIT = 3.0  # seconds that one call exceeds and the next ones do not, whatever holds the machine up


class Order(BaseModel):
    id: int


class Shop:
    """An outbox whose listener takes lists and writes an effect for each order."""

    def __init__(self, outbox: Outbox, effects: Table, recorder: Recorder) -> None:
        self.outbox = outbox
        self.effects = effects
        self.recorder = recorder
        self.calls: list[list[int]] = []  # of the listener, by the ids of the orders

    async def send(self, listener: Listener, *bodies: object) -> list[Message]:
        """Lay messages in the listener's queue, all of them before it begins."""
        messages = [Message(routing_key="order.created", body=json.dumps(body).encode()) for body in bodies]
        await self.send_again(listener, messages)
        return messages

    async def send_again(self, listener: Listener, messages: Sequence[Message]) -> None:
        transport = self.outbox.transport
        await self.outbox.store.open()
        await transport.declare([listener])
        for message in messages:  # one after another: a broker does not mind copies
            await transport.publish([message])

    async def write(self, session: AsyncSession, orders: Sequence[Order]) -> None:
        self.calls.append([order.id for order in orders])
        if orders:
            await session.execute(insert(self.effects), [{"n": order.id} for order in orders])

    async def written(self) -> list[int]:
        async with self.outbox.transaction() as session:
            return list(await session.scalars(select(self.effects.c.n).order_by(self.effects.c.n)))

    async def entries(self) -> int:
        async with self.outbox.transaction() as session:
            return await session.scalar(select(func.count()).select_from(self.outbox.tables.inbox)) or 0

    async def ends(self, listener: Listener, count: int) -> list[Handled]:
        """Let a worker serve until so many attempts have ended."""
        async with self.outbox.running(listeners=[listener]):
            return await self.recorder.wait_for(Handled, count)


@pytest.fixture(params=["database", "memory"])
def transport(request: pytest.FixtureRequest) -> str | None:
    return "memory://" if request.param == "memory" else None


@pytest.fixture
async def shop(make_outbox: MakeOutbox, table_name: str, transport: str | None) -> Shop:
    return await make_shop(make_outbox, table_name, transport)


@pytest.fixture
async def on_the_database(make_outbox: MakeOutbox, table_name: str) -> Shop:
    return await make_shop(make_outbox, table_name, None)


@pytest.fixture
async def in_memory(make_outbox: MakeOutbox, table_name: str) -> Shop:
    return await make_shop(make_outbox, table_name, "memory://")


async def make_shop(make_outbox: MakeOutbox, table_name: str, transport: str | None) -> Shop:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder], transport=transport)
    table = Table(f"{table_name}_effects", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer))
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(table.metadata.create_all)
    return Shop(outbox, table, recorder)


def outcomes(events: Sequence[Handled]) -> dict[object, list[Any]]:
    """How attempts ended, by what their messages say."""
    found: dict[object, list[Any]] = {}
    for event in events:
        found.setdefault(_said(event.attempt.message), []).append(event.outcome)
    return found


def _said(message: Message) -> object:
    body = json.loads(message.body)
    return body["id"] if isinstance(body, dict) else body


def are_done(found: dict[object, list[Any]], *orders: int) -> bool:
    return all(len(found[order]) == 1 and isinstance(found[order][0], Done) for order in orders)


async def test_all_that_is_there_comes_in_one_call_and_one_transaction(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)

    await shop.send(listener, *({"id": number} for number in range(30)))
    with Statements() as statements:
        ended = await shop.ends(listener, 30)
    assert shop.calls == [list(range(30))]
    assert are_done(outcomes(ended), *range(30))
    assert await shop.written() == list(range(30))
    inbox, messages = shop.outbox.tables.inbox.name, shop.outbox.tables.messages.name
    entries = [each for each in statements if re.match(rf"INSERT INTO (public\.)?{inbox}\b", each)]
    if shop.outbox.settings.transport is None:
        assert len([each for each in statements if re.match(rf"DELETE FROM (public\.)?{messages} WHERE", each)]) == 1
        assert not entries
        assert (await shop.outbox.backlog()).queues[0].queued == 0
    else:
        assert len(entries) == 1
        assert await shop.entries() == 30


async def test_no_list_is_longer_than_the_batch(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=4, concurrency=1)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)

    await shop.send(listener, *({"id": number} for number in range(10)))
    await shop.ends(listener, 10)
    assert sorted(len(call) for call in shop.calls) == [2, 4, 4]
    assert await shop.written() == list(range(10))


async def test_as_many_lists_as_its_concurrency_are_at_work(in_memory: Shop) -> None:
    both = asyncio.Barrier(2)

    @listen("order.*", queue="q", batch=3, concurrency=2)
    async def listener(orders: list[Order]) -> None:
        in_memory.calls.append([order.id for order in orders])
        async with asyncio.timeout(PATIENCE):
            await both.wait()

    await in_memory.send(listener, *({"id": number} for number in range(6)))
    await in_memory.ends(listener, 6)
    assert in_memory.calls == [[0, 1, 2], [3, 4, 5]]


async def test_single_failures_are_retried_alone_and_the_rest_commits(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=(0.01,))
    async def listener(orders: list[Order], session: AsyncSession, attempt_count: int) -> dict[int, Exception]:
        failed: dict[int, Exception] = {}
        if attempt_count == 1:
            failed = {n: OSError("no") for n, order in enumerate(orders) if order.id in (1, 3)}
        await shop.write(session, [order for n, order in enumerate(orders) if n not in failed])
        return failed

    await shop.send(listener, *({"id": number} for number in range(5)))
    found = outcomes(await shop.ends(listener, 7))
    assert shop.calls[0] == [0, 2, 4]
    assert sorted(shop.calls[1:]) == [[1], [3]]
    assert await shop.written() == [0, 1, 2, 3, 4]
    assert are_done(found, 0, 2, 4)
    for order in (1, 3):
        failed, done = found[order]
        assert isinstance(failed, RetryIn)
        assert "OSError: no" in failed.error
        assert isinstance(done, Done)
    if shop.outbox.settings.transport is not None:
        assert await shop.entries() == 5


async def test_a_single_failure_may_be_the_last(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=())
    async def listener(orders: list[Order], session: AsyncSession) -> dict[int, Exception]:
        await shop.write(session, orders[:1])
        return {1: Reject("never paid"), 2: OSError("no")}

    await shop.send(listener, {"id": 0}, {"id": 1}, {"id": 2})
    found = outcomes(await shop.ends(listener, 3))
    assert are_done(found, 0)
    assert [each.reason for each in (*found[1], *found[2])] == [Reason.REJECTED, Reason.EXHAUSTED]
    letters = await shop.outbox.dead_letters.list(queue="q")
    assert {_said(letter.message): letter.attempt_count for letter in letters} == {1: 1, 2: 1}
    assert await shop.written() == [0]


async def test_a_call_that_raises_is_undone_and_each_message_tried_alone(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=())
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)
        if any(order.id == 2 for order in orders):
            raise ValueError("poison")

    await shop.send(listener, *({"id": number} for number in range(5)))
    ended = await shop.ends(listener, 5)
    found = outcomes(ended)
    assert shop.calls == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert are_done(found, 0, 1, 3, 4)
    assert [(each.reason, each.error.splitlines()[0]) for each in found[2]] == [
        (Reason.EXHAUSTED, "ValueError: poison")
    ]
    assert {event.attempt.attempt_count for event in ended} == {1}
    assert await shop.written() == [0, 1, 3, 4]
    [told] = shop.recorder.of(Troubled)
    assert told.where == "5 messages of q together"


async def test_a_listener_that_returns_something_else_has_failed(in_memory: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=())
    async def listener(orders: list[Order], session: AsyncSession) -> Any:
        await in_memory.write(session, orders)
        return [order.id for order in orders]

    await in_memory.send(listener, {"id": 0}, {"id": 1})
    found = outcomes(await in_memory.ends(listener, 2))
    assert all("a dict of positions" in outcome.error for [outcome] in found.values())
    assert await in_memory.written() == []


async def test_a_body_that_cannot_be_read_is_dead_alone(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)

    await shop.send(listener, {"id": 0}, "no order", {"id": 2})
    found = outcomes(await shop.ends(listener, 3))
    assert shop.calls == [[0, 2]]
    assert are_done(found, 0, 2)
    assert [each.reason for each in found["no order"]] == [Reason.UNDECODABLE]


async def test_what_was_handled_before_is_not_in_the_list(in_memory: Shop) -> None:
    @listen("order.*", queue="q", batch=100)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await in_memory.write(session, orders)

    first = await in_memory.send(listener, {"id": 0}, {"id": 1}, {"id": 2})
    await in_memory.ends(listener, 3)
    await in_memory.send_again(listener, first[:2])
    await in_memory.send(listener, {"id": 3})
    await in_memory.ends(listener, 6)
    await in_memory.send_again(listener, first)
    ended = await in_memory.ends(listener, 9)
    assert in_memory.calls == [[0, 1, 2], [3]]
    assert all(isinstance(event.outcome, Done) for event in ended)
    assert await in_memory.written() == [0, 1, 2, 3]


async def test_of_copies_in_one_list_the_first_counts(in_memory: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=(0.01,))
    async def listener(orders: list[Order], session: AsyncSession, attempt_count: int) -> dict[int, Exception]:
        failed: dict[int, Exception] = {
            n: OSError("no") for n, order in enumerate(orders) if order.id == 1 and len(in_memory.calls) == 0
        }
        await in_memory.write(session, [order for n, order in enumerate(orders) if n not in failed])
        return failed

    messages = await in_memory.send(listener, {"id": 0}, {"id": 1})
    await in_memory.send_again(listener, messages)
    ended = await in_memory.ends(listener, 5)
    assert in_memory.calls == [[0], [1]]  # the copy of what failed takes its place, and the retry finds it handled
    assert len([event for event in ended if isinstance(event.outcome, Done)]) == 4
    assert await in_memory.written() == [0, 1]


async def test_a_list_in_which_one_lease_was_lost_runs_again_without_it(
    on_the_database: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "LEASE_LOST_PAUSE", timedelta(milliseconds=200))
    shop, messages = on_the_database, on_the_database.outbox.tables.messages

    @listen("order.*", queue="q", batch=100, lease=LONG_LEASE)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)
        if len(shop.calls) == 1:  # as if the lease ran out while it worked; it is undone with all the rest
            long_ago = datetime.now(UTC) - timedelta(hours=1)
            await session.execute(update(messages).where(messages.c.message_id == lost.id).values(lease_until=long_ago))

    _, lost, _ = await shop.send(listener, {"id": 0}, {"id": 1}, {"id": 2})
    async with shop.outbox.running(listeners=[listener]):
        await shop.recorder.wait_for(Handled, 3)
    assert shop.calls == [[0, 1, 2], [0, 2], [1]]
    assert len(shop.recorder.of(LeaseWasLost)) == 1
    assert are_done(outcomes(shop.recorder.of(Handled)), 0, 1, 2)
    assert await shop.written() == [0, 1, 2]


async def test_a_list_needs_no_session(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=())
    async def listener(orders: list[Order], messages: list[Message]) -> dict[int, Exception]:
        shop.calls.append([order.id for order in orders])
        assert [json.loads(message.body)["id"] for message in messages] == shop.calls[-1]
        return {1: OSError("no")}

    await shop.send(listener, {"id": 0}, {"id": 1}, {"id": 2})
    found = outcomes(await shop.ends(listener, 3))
    assert shop.calls == [[0, 1, 2]]
    assert are_done(found, 0, 2)
    assert [each.reason for each in found[1]] == [Reason.EXHAUSTED]


async def test_a_plain_function_gets_a_list_and_a_plain_session(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, retry_delays=())
    def listener(orders: list[Order], session: Session) -> dict[int, Exception]:
        shop.calls.append([order.id for order in orders])
        session.execute(insert(shop.effects), [{"n": order.id} for order in orders[1:]])
        return {0: OSError("no")}

    await shop.send(listener, {"id": 0}, {"id": 1}, {"id": 2})
    found = outcomes(await shop.ends(listener, 3))
    assert are_done(found, 1, 2)
    assert await shop.written() == [1, 2]


async def test_a_list_that_takes_too_long_is_undone_and_each_message_tried_alone(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=100, timeout=LIMIT)
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)
        if len(orders) > 1:
            await asyncio.Event().wait()

    await shop.send(listener, {"id": 0}, {"id": 1})
    found = outcomes(await shop.ends(listener, 2))
    assert shop.calls == [[0, 1], [0], [1]]
    assert are_done(found, 0, 1)
    assert await shop.written() == [0, 1]


async def test_a_list_that_outlives_its_grace_is_given_back_untried(
    make_outbox: MakeOutbox, table_name: str, transport: str | None
) -> None:
    shop = await make_shop(lambda **options: make_outbox(grace=0.1, **options), table_name, transport)

    @listen("order.*", queue="q", batch=100)
    async def stuck(orders: list[Order], session: AsyncSession) -> None:
        await shop.write(session, orders)
        await asyncio.Event().wait()

    @listen("order.*", queue="q", batch=100)
    async def listener(orders: list[Order], session: AsyncSession, attempt_count: int) -> None:
        assert attempt_count == 1
        await shop.write(session, orders)

    await shop.send(stuck, {"id": 0}, {"id": 1})
    async with shop.outbox.running(listeners=[stuck]):
        await eventually(lambda: shop.calls)
    assert shop.recorder.of(Handled) == []
    found = outcomes(await shop.ends(listener, 2))
    assert are_done(found, 0, 1)
    assert await shop.written() == [0, 1]


async def test_draining_gives_a_listener_its_lists(shop: Shop) -> None:
    @listen("order.*", queue="q", batch=3, retry_delays=(60,))
    async def listener(orders: list[Order], session: AsyncSession, attempt_count: int) -> dict[int, Exception]:
        failed: dict[int, Exception] = {0: OSError("no")} if attempt_count == 1 and orders[0].id == 0 else {}
        await shop.write(session, [order for n, order in enumerate(orders) if n not in failed])
        return failed

    await shop.send(listener, *({"id": number} for number in range(5)))
    drained = await drain(shop.outbox, [listener])
    assert shop.calls == [[1, 2], [3, 4], [0]]
    assert (drained.handled, drained.retried, drained.left) == (5, 1, 0)
    assert await shop.written() == [0, 1, 2, 3, 4]


async def test_a_database_that_gives_no_connection_burns_no_attempt_of_a_list(
    in_memory: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, failures = in_memory.outbox.store, [OSError("away")]
    entering: Callable[..., set[str]] = store.inbox.remember_all

    def remember_all(*arguments: Any, **options: Any) -> set[str]:
        if failures:
            raise failures.pop()
        return entering(*arguments, **options)

    monkeypatch.setattr(store.inbox, "remember_all", remember_all)

    @listen("order.*", queue="q", batch=100, retry_delays=())
    async def listener(orders: list[Order], session: AsyncSession) -> None:
        await in_memory.write(session, orders)

    await in_memory.send(listener, {"id": 0}, {"id": 1})
    found = outcomes(await in_memory.ends(listener, 4))
    assert all([type(outcome) for outcome in found[order]] == [Released, Done] for order in (0, 1))
    assert [sorted(call) for call in in_memory.calls] == [[0, 1]]
