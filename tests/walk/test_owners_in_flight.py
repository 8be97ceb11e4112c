"""A message in flight has one owner, which settles it or gives it back: whoever is cancelled loses and repeats nothing.

The owners are named in the architecture page. Leases last for an hour here, so that only what was given back is
delivered again in time. That every single wait can be cut is shown in test_cancellation.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox
from outbox.core.events import Handled
from outbox.transports.http import HttpTransport
from tests.support.observing import PATIENCE, Recorder, eventually
from tests.support.outboxes import MakeOutbox, emit
from tests.support.sending import serving as serving_application

from .profiling import PACKAGE, passes
from .roads import Road, Step, owners, roads
from .strategies import Effects, reached

WAYS = {
    "The database on SQLite": "sqlite",
    "The database on PostgreSQL": "postgresql+asyncpg",
    "RabbitMQ": "postgresql+asyncpg",
    "HTTP out and HTTP in": "postgresql+asyncpg",
}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

MOST_OWNERS = 4


@pytest.mark.parametrize("road", ["database", "RabbitMQ", "HTTP"])
def test_no_road_has_more_than_four_owners(road: str) -> None:
    found = {(owner, file) for on, owner, file in owners() if on.startswith("all") or road in on}
    assert 2 <= len(found) <= MOST_OWNERS
    for owner, file in found:
        assert f"\nclass {owner}" in (PACKAGE / file).read_text()


def after_the_commit(road: Road) -> list[Step]:
    """Before it a message is its caller's, who has the transaction."""
    commits = [number for number, (_, function) in enumerate(road.steps, 1) if "commit" in function]
    return list(road.steps[commits[0] if commits else 0 :])


STEPS = [
    pytest.param(name, step, id=f"{name}-{step[1]}")
    for name, road in roads().items()
    if name in WAYS
    for step in after_the_commit(road)
]


@asynccontextmanager
async def serving(outbox: Outbox, listeners: list[Listener], relay: bool = False) -> AsyncIterator[asyncio.Task[None]]:
    """A worker, and a relay beside it, in a task to cancel."""

    async def serve() -> None:
        async with outbox.running(relay=relay, listeners=listeners):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving_both_ways(
    make_outbox: MakeOutbox, listeners: list[Listener], **options: Any
) -> AsyncIterator[tuple[asyncio.Task[None], Outbox, Outbox]]:
    """A relay that posts, and the application that takes, handles and ends with it: in a task to cancel."""
    table_name = options.pop("table_name")
    receiver = make_outbox(table_name=f"{table_name}_in", **options)
    sender: asyncio.Future[Outbox] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with serving_application(receiver.http_app(listeners, secrets=SECRET)) as server:
            transport = HttpTransport(f"http://127.0.0.1:{server.port}/", secrets=SECRET)
            outbox = make_outbox(table_name=table_name, transport=transport, **options)
            async with outbox.running(relay=True):
                sender.set_result(outbox)
                await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    try:
        yield task, await sender, receiver
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def on_the_road(
    name: str, make_outbox: MakeOutbox, listener: Listener, **options: Any
) -> AsyncIterator[tuple[asyncio.Task[None], list[Outbox]]]:
    """What carries and handles messages on a road, in a task to cancel; and its outboxes, the one that emits first."""
    if name.startswith("HTTP"):
        async with serving_both_ways(make_outbox, [listener], **options) as (task, *outboxes):
            yield task, outboxes
    else:
        outbox = make_outbox(**options)
        async with serving(outbox, [listener], relay=name == "RabbitMQ") as task:
            yield task, [outbox]


@contextmanager
def cancelling_at(step: Step, task: asyncio.Task[None], committed: Callable[[], bool]) -> Iterator[asyncio.Event]:
    """Cancel the task when a function is called for the first time; the event tells that it was.

    What is called before the message is committed has no owner to cancel: the caller has.
    """
    loop, happened = asyncio.get_running_loop(), asyncio.Event()

    def cancel() -> None:
        if not task.cancelling():
            task.cancel()

    def note(frame: FrameType, kind: str, _: Any) -> None:
        if kind == "call" and passes(frame) == step and not happened.is_set():
            happened.set()
            if committed():
                loop.call_soon(cancel)

    sys.setprofile(note)
    try:
        yield happened
    finally:
        sys.setprofile(None)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = request.node.callspec.params.get("name", "The database on SQLite")
    if WAYS[name] == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url.replace("postgresql://", f"{WAYS[name]}://", 1)


@pytest.mark.parametrize(("name", "step"), STEPS)
async def test_who_is_cancelled_at_a_step_of_a_road_loses_and_repeats_nothing(
    name: str, step: Step, make_outbox: MakeOutbox, table_name: str, effects: Effects, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"table_name": table_name, "lease": 3600, "poll_interval": 1.0, "grace": 1}
    if name == "RabbitMQ":
        options["transport"] = request.getfixturevalue("rabbitmq_url")

    async def bill(body: str, session: AsyncSession) -> None:
        await session.execute(effects.write(body))

    listener = Listener("order.created", bill, queue="billing")
    commits = 0

    def committed(_: object) -> None:
        nonlocal commits
        commits += 1

    async with on_the_road(name, make_outbox, listener, **options) as (task, [cancelled, *_]):
        await emit(cancelled, "a message to warm up with")
        await eventually(lambda: effects.all())
        await asyncio.sleep(0.1)  # its end is written, too
        with cancelling_at(step, task, lambda: commits > 0) as happened:
            async with cancelled.transaction() as session:
                event.listen(session.sync_session, "after_commit", committed)
                await cancelled.emit(session, "order.created", "the message")
            await reached(happened)
            if not task.cancelling():
                task.cancel()
            with suppress(asyncio.CancelledError):
                async with asyncio.timeout(PATIENCE):
                    await task
    async with on_the_road(name, make_outbox, listener, **options) as (_, outboxes):
        await eventually(lambda: _is_among(effects, "the message"))
        for outbox in outboxes:
            await eventually(partial(_everything_is_over, outbox))
    assert Counter(await effects.all()) == Counter(["a message to warm up with", "the message"])


async def _is_among(effects: Effects, what: str) -> bool:
    return what in await effects.all()


async def _everything_is_over(outbox: Outbox) -> bool:
    """Nothing waits and nothing is held, here or at a broker."""
    backlog = await outbox.backlog()
    left = [queue.open + (queue.leased or 0) for queue in backlog.queues]
    return not (backlog.waiting or backlog.leased or any(left))


@pytest.fixture
def name() -> str:
    return "The database on SQLite"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.mark.parametrize("name", ["The database on SQLite", "The database on PostgreSQL"])
async def test_what_waits_for_a_slot_and_what_a_listener_has_begun_are_given_back(
    name: str, make_outbox: MakeOutbox, effects: Effects, recorder: Recorder
) -> None:
    begun = asyncio.Event()

    async def hang(body: str, session: AsyncSession) -> None:
        await session.execute(effects.write("of the one that was cancelled"))
        begun.set()
        await asyncio.Event().wait()

    async def bill(body: str, session: AsyncSession) -> None:
        await session.execute(effects.write(body))

    cancelled = make_outbox(lease=3600, grace=1)
    bodies = [f"message {number}" for number in range(10)]
    async with serving(cancelled, [Listener("#", hang, queue="billing", concurrency=1)]):
        await emit(cancelled, *bodies)
        await reached(begun)
    # What cannot be given back in time would wait for the end of its lease, as a crash would have it.
    async with serving(make_outbox(lease=3600, observers=[recorder]), [Listener("#", bill, queue="billing")]):
        await recorder.wait_for(Handled, len(bodies))
    assert Counter(await effects.all()) == Counter(bodies)
    assert {event.attempt.crash_count for event in recorder.of(Handled)} == {0}


@pytest.mark.parametrize("name", ["The database on SQLite", "The database on PostgreSQL"])
async def test_an_outcome_that_is_known_is_written_by_who_is_cancelled(
    name: str, make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    calls: list[str] = []
    known = asyncio.Event()

    async def bill(body: str) -> None:
        calls.append(body)
        if body == "first":
            known.set()  # it returns now; its outcome waits for that of the second
        elif calls.count(body) == 1:
            await asyncio.Event().wait()

    listener = Listener("#", bill, queue="billing", concurrency=2)
    cancelled = make_outbox(lease=3600, grace=1, batch_size=2)
    await cancelled.create_tables()
    async with serving(cancelled, [listener]) as task:
        await emit(cancelled, "first", "second")
        await reached(known)
        asyncio.get_running_loop().call_later(0.002, task.cancel)
        with suppress(asyncio.CancelledError):
            await task
    async with serving(make_outbox(lease=3600, observers=[recorder]), [listener]):
        await eventually(lambda: _everything_is_over(cancelled))
    assert Counter(calls) == Counter({"first": 1, "second": 2})


@pytest.mark.parametrize("name", ["The database on SQLite", "The database on PostgreSQL"])
@pytest.mark.parametrize("at", ["claimed", "publishing", "answered"])
async def test_a_relay_gives_back_what_has_no_answer_and_writes_what_has_one(
    name: str, at: str, make_outbox: MakeOutbox, table_name: str
) -> None:
    """A destination that is told twice, because its answer was lost, finds the id of the message in its inbox."""
    receiver = make_outbox(table_name=f"{table_name}_in")
    await receiver.create_tables()
    arrived = asyncio.Event()
    tries: Counter[str] = Counter()

    async def publish(message: Message) -> None:
        tries[message.id] += 1
        if tries[message.id] == 1 and at == "claimed":
            arrived.set()
            await asyncio.Event().wait()  # nothing was sent yet
        await receiver.receive("billing", message, unwanted="wait")
        if tries[message.id] == 1:
            arrived.set()
            if at == "publishing":
                await asyncio.Event().wait()  # the answer is on its way

    options: dict[str, Any] = {"lease": 3600, "transport": publish, "poll_interval": 0.2, "grace": 1}
    cancelled = make_outbox(**options)
    async with serving(cancelled, [], relay=True):
        await emit(cancelled, "the message")
        await reached(arrived)
        await asyncio.sleep(0)
    async with serving(make_outbox(**options), [], relay=True):
        await eventually(lambda: _everything_is_over(cancelled))
    [found] = await receiver.messages()
    assert found.queue == "billing"
    assert list(tries.values()) in ([1], [2]) if at == "answered" else list(tries.values()) == [2]
