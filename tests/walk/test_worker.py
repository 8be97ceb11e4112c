"""A worker and listeners that do everything they should not."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Table, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import ConfigurationError, Message, Outbox, Reject, RetryPolicy, listen
from outbox.core.events import Handled, LeaseWasLost, StillRunning, Stopped
from outbox.core.store import Selection
from outbox.inbound import worker
from outbox.stores.claiming import SqlClaim
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.effects import made, numbers_table, written
from tests.walk.strategies import Watch

SHORT, LIMIT = 1.0, 3.0  # seconds that one listener exceeds, and that the next one does not, whatever holds it up


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Table:
    return await made(outbox, numbers_table(table_name))


async def test_no_more_listeners_run_at_a_time_than_their_concurrency(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])
    running, most = 0, 0
    all_at_work = asyncio.Barrier(3)

    @listen("#", queue="q", concurrency=3)
    async def listener(body: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await all_at_work.wait()
        running -= 1

    await emit(outbox, *range(30))
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 30)
    assert most == 3


async def test_a_slow_queue_does_not_hold_up_another(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])
    release = asyncio.Event()

    @listen("#", queue="slow", concurrency=1)
    async def slow(body: int) -> None:
        await release.wait()

    @listen("#", queue="quick")
    async def quick(body: int) -> None: ...

    await emit(outbox, *range(20))
    async with outbox.running(listeners=[slow, quick]):
        handled = await watch.wait_for(Handled, 20)
        assert {event.queue for event in handled} == {"quick"}
        release.set()


async def test_a_slow_listener_takes_no_more_than_it_needs(make_outbox: MakeOutbox) -> None:
    """What one worker does not start soon is left for the others."""
    outbox = make_outbox()
    started, release = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q", concurrency=2)
    async def slow(body: int) -> None:
        started.set()
        await release.wait()

    await emit(outbox, *range(100))
    async with outbox.running(listeners=[slow]):
        await asyncio.wait_for(started.wait(), PATIENCE)
        await asyncio.sleep(0.2)
        assert ((await outbox.backlog()).leased or 0) <= 6
        release.set()


async def test_what_a_failing_listener_wrote_in_its_session_is_rolled_back(
    make_outbox: MakeOutbox, watch: Watch, effects: Table
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("order.*", queue="q", retry_delays=(0, 0))
    async def listener(body: int, session: AsyncSession, attempt_count: int) -> None:
        await session.execute(insert(effects).values(n=attempt_count))
        await outbox.emit(session, "follow.up", attempt_count)
        if attempt_count < 3:
            raise ValueError(f"attempt {attempt_count}")

    @listen("follow.*", queue="follow")
    async def follow(body: int) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener, follow]):
        await watch.wait_for(Handled, 4)
    assert await written(outbox, effects) == [3]
    assert [event.attempt.message.body for event in watch.of(Handled) if event.queue == "follow"] == [b"3"]


async def test_a_listener_that_takes_too_long_is_stopped_and_leaves_nothing(
    make_outbox: MakeOutbox, watch: Watch, effects: Table
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", timeout=0.3, retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(n=body))
        await asyncio.sleep(3600)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [event] = await watch.wait_for(Handled)
    assert isinstance(event.error, TimeoutError)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, "TimeoutError" in letter.error) == ("exhausted", True)
    assert await written(outbox, effects) == []


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_a_worker_that_lost_its_lease_cannot_commit_its_listeners_session(
    make_outbox: MakeOutbox, watch: Watch, effects: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker sleeps through its lease, as if it had been stopped; a second one does the work."""

    async def asleep(self: SqlClaim) -> None:
        await asyncio.sleep(3600)

    late = make_outbox(observers=[watch], lease=0.5, prefetch_count=1)  # so that it does not claim the message itself
    prompt = make_outbox(observers=[watch])
    go_on = asyncio.Event()

    def listener(name: str) -> Any:
        @listen("#", queue="q", concurrency=1)
        async def work(body: int, session: AsyncSession) -> None:
            if name == "late":
                started.set()
                await go_on.wait()
            await session.execute(insert(effects).values(n=body))

        return work

    started = asyncio.Event()
    await emit(late, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SqlClaim, "_renew", asleep)
        held = late.running(listeners=[listener("late")])
        await held.__aenter__()
        await asyncio.wait_for(started.wait(), PATIENCE)
    async with prompt.running(listeners=[listener("prompt")]):
        await watch.wait_for(Handled)
        go_on.set()
        await watch.wait_for(LeaseWasLost)
    await held.__aexit__(None, None, None)
    assert await written(late, effects) == [1]
    [lost] = watch.of(LeaseWasLost)
    assert (lost.phase, lost.queue) == ("completion", "q")


async def test_what_a_dead_worker_held_in_several_queues_comes_back_without_long_pauses(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    """Suspects come one at a time; whoever has to wait for another queue's is told when it is gone."""
    outbox = make_outbox(observers=[watch], poll_interval=4 * PATIENCE)

    def listener(queue: str) -> Any:
        @listen("order.*", queue=queue)
        async def work(body: int) -> None: ...

        return work

    listeners = [listener(queue) for queue in ("a", "b", "c")]
    await outbox.store.queues.bind([each.binding for each in listeners])
    await emit(outbox, *range(10))
    await outbox.store.queues.route(100, {})
    held = [
        outbox.store.feed.claim(Selection(limit=10, lease=timedelta(seconds=0.2), destination=queue))
        for queue in ("a", "b", "c")
    ]
    for claim in held:
        await claim.__aenter__()
        claim._renewal.cancel()  # type: ignore[attr-defined]
    await asyncio.sleep(0.25)
    async with outbox.running(listeners=listeners):
        handled = await watch.wait_for(Handled, 30)
    assert {event.attempt.crash_count for event in handled} == {1}


async def test_a_listener_that_runs_for_very_long_is_spoken_of_once(
    make_outbox: MakeOutbox, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LONG_RUN", 0.15)
    outbox = make_outbox(observers=[watch])
    release = asyncio.Event()

    @listen("#", queue="q")
    async def listener(body: int) -> None:
        await release.wait()

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [event] = await watch.wait_for(StillRunning)
        await asyncio.sleep(0.1)
        release.set()
        await watch.wait_for(Handled)
    assert watch.of(StillRunning) == [event]
    assert (event.queue, event.attempt.message.body) == ("q", b"1")


async def test_plain_functions_run_in_threads_side_by_side(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])
    together = threading.Barrier(5, timeout=PATIENCE)

    @listen("#", queue="q", concurrency=5)
    def listener(body: int) -> None:
        together.wait()

    await emit(outbox, *range(5))
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 5)


async def test_a_plain_function_gets_a_plain_session(make_outbox: MakeOutbox, watch: Watch, effects: Table) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("order.*", queue="q", retry_delays=(0,))
    def listener(body: int, session: Session, attempt_count: int) -> None:
        session.execute(insert(effects).values(n=attempt_count))
        outbox.emit_sync(session, "follow.up", attempt_count)
        if attempt_count == 1:
            raise ValueError("not yet")

    @listen("follow.*", queue="follow")
    async def follow(body: int) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener, follow]):
        await watch.wait_for(Handled, 3)
    assert await written(outbox, effects) == [2]


def patience(message: Message) -> float:
    return SHORT if message.body == b"1" else LIMIT


async def test_a_thread_that_takes_too_long_keeps_its_slot(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])
    release = threading.Event()
    runs = []

    @listen("#", queue="q", concurrency=1, timeout=patience, retry_delays=())
    def listener(body: int) -> None:
        runs.append(body)
        release.wait(PATIENCE)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled)
        await emit(outbox, 2)
        await asyncio.sleep(0.3)
        assert runs == [1]
        release.set()
        await watch.wait_for(Handled, 2)
    assert runs == [1, 2]
    [letter] = await outbox.dead_letters.list()
    assert letter.message.body == b"1"


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_what_a_thread_does_after_its_time_is_fenced(
    make_outbox: MakeOutbox, watch: Watch, effects: Table
) -> None:
    """SQLite lets nobody write while the thread's transaction is open, so there its end simply counts."""
    outbox = make_outbox(observers=[watch])
    release = threading.Event()

    @listen("#", queue="q", concurrency=1, timeout=patience, retry_delays=())
    def listener(body: int, session: Session) -> None:
        session.execute(insert(effects).values(n=body))
        if body == 1:
            release.wait(PATIENCE)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled)
        release.set()
        await emit(outbox, 2)
        await watch.wait_for(Handled, 2)
    assert await written(outbox, effects) == [2]
    [letter] = await outbox.dead_letters.list()
    assert letter.message.body == b"1"


@pytest.mark.parametrize(
    "error", [ValueError("boom"), SystemExit(3), asyncio.CancelledError(), RecursionError(), MemoryError()]
)
async def test_whatever_a_listener_raises_ends_in_a_retry_and_then_a_dead_letter(
    make_outbox: MakeOutbox, watch: Watch, error: BaseException
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", retry_delays=(0,))
    async def listener(body: int) -> None:
        raise error

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("exhausted", 2)
    assert letter.error.startswith(type(error).__name__) or type(error).__name__ in letter.error.splitlines()[0]


async def test_a_listener_that_cancels_itself_has_failed(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", retry_delays=(0,))
    async def listener(body: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("exhausted", 2)


async def test_a_policy_decides_by_the_error(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch], retry_delays=RetryPolicy.constant(0, attempts=3, never=(KeyError,)))

    @listen("a", queue="a")
    async def transient(body: int) -> None:
        raise ValueError

    @listen("b", queue="b")
    async def permanent(body: int) -> None:
        raise KeyError

    @listen("c", queue="c", retry_delays=lambda attempt_count, error: 0 if attempt_count < 2 else None)
    async def called(body: int) -> None:
        raise ValueError

    @listen("d", queue="d", retry_delays=lambda attempt_count, error: 1 / 0)
    async def broken(body: int) -> None:
        raise ValueError("the real reason")

    for routing_key in "abcd":
        await emit(outbox, 1, routing_key=routing_key)
    async with outbox.running(listeners=[transient, permanent, called, broken]):
        await watch.wait_for(Handled, 3 + 1 + 2 + 1)
    letters = {letter.queue: letter for letter in await outbox.dead_letters.list()}
    assert {queue: letter.attempt_count for queue, letter in letters.items()} == {"a": 3, "b": 1, "c": 2, "d": 1}
    assert "the real reason" in letters["d"].error


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds its cancellation", "swallows it"])
async def test_a_listener_that_outlives_its_grace_is_abandoned_and_its_message_given_back(
    make_outbox: MakeOutbox, watch: Watch, effects: Table, heeds: bool
) -> None:
    outbox = make_outbox(observers=[watch], grace=0.2)
    started, calls = asyncio.Event(), 0

    @listen("#", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        nonlocal calls
        calls += 1
        await session.execute(insert(effects).values(n=calls))
        if calls == 1:
            started.set()
            with suppress(*(() if heeds else (asyncio.CancelledError,))):
                await asyncio.sleep(3600)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await asyncio.wait_for(started.wait(), PATIENCE)
    [stopped] = watch.of(Stopped)
    assert stopped.abandoned == 1
    [stored] = await outbox.messages()
    assert (stored.leased_until, stored.attempt_count, stored.crash_count) == (None, 0, 0)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled)
    assert await written(outbox, effects) == [2]


async def test_a_listener_that_heeds_no_cancellation_does_not_keep_the_worker(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    outbox = make_outbox(observers=[watch], grace=0.1)
    started, release = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q")
    async def stubborn(body: int) -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    await emit(outbox, 1)
    began = time.monotonic()
    async with outbox.running(listeners=[stubborn]):
        await asyncio.wait_for(started.wait(), PATIENCE)
    assert time.monotonic() - began < PATIENCE
    assert watch.of(Stopped)[0].abandoned == 1
    release.set()


async def test_a_worker_that_is_cancelled_ends_and_gives_everything_back(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    started = asyncio.Event()

    @listen("#", queue="q", concurrency=1)
    async def listener(body: int) -> None:
        started.set()
        await asyncio.sleep(3600)

    await emit(outbox, 1, 2, 3)
    task = asyncio.create_task(outbox.worker([listener]))
    await asyncio.wait_for(started.wait(), PATIENCE)
    task.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    backlog = await outbox.backlog()
    assert (backlog.leased, backlog.queues[0].queued) == (0, 3)


async def test_two_listeners_on_one_queue_are_refused(outbox: Outbox) -> None:
    @listen("a", queue="q")
    async def first(body: int) -> None: ...

    @listen("b", queue="q")
    async def second(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="share the queue 'q'"):
        await outbox.worker([first, second])


async def test_a_listener_without_a_place_for_the_body_is_refused_before_anything_is_touched(outbox: Outbox) -> None:
    @listen("#", queue="q")
    async def listener(routing_key: str) -> None: ...

    await emit(outbox, 1)
    with pytest.raises(ConfigurationError, match="exactly one argument takes the body"):
        await outbox.worker([listener])
    assert await outbox.bindings() == []


async def test_a_time_limit_that_outlasts_its_lease_is_refused_where_one_writes_at_a_time(outbox: Outbox) -> None:
    """SQLite: while the listener's transaction is open, its lease cannot be renewed."""

    @listen("#", queue="q", timeout=10, lease=5)
    async def listener(body: int, session: AsyncSession) -> None: ...

    @listen("#", queue="plain", timeout=10, lease=5)
    async def plain(body: int) -> None: ...

    if "sqlite" in str(outbox.engines.main.url):
        with pytest.raises(ConfigurationError, match=r"timeout=10 s is not shorter than its lease of 5 s"):
            await outbox.worker([listener])
        listeners = [plain]
    else:
        listeners = [listener, plain]
    async with outbox.running(listeners=listeners):
        pass


async def test_a_rejected_message_is_dead_without_retries(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch], redact_error=lambda text: text.replace("4111-1111", "****"))

    @listen("#", queue="q")
    async def listener(body: int) -> None:
        raise Reject("card 4111-1111 is no card")

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("rejected", 1)
    assert "card **** is no card" in letter.error
