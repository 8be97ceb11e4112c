""" "Graceful shutdown", its sequence diagram included, with signals in this process and with real processes.

What the project's broker does by "reject with requeue" is here a lease given back: no attempt, no start, due at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, Outbox, listen
from outbox.core.events import Handled, Stopped
from outbox.outbound.relay import SIDE_BY_SIDE
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import PATIENCE, Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.program import program

SIGNALS = [signal.SIGINT, signal.SIGTERM]


async def emit_and_commit(outbox: Outbox, number: int) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "event", number)


async def leased(outbox: Outbox) -> int:
    return (await outbox.backlog()).leased or 0


async def waiting_bodies(outbox: Outbox) -> list[bytes]:
    return [stored.message.body for stored in await outbox.messages()]


def signal_this_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# The sequence diagram

WORKER = """
    import asyncio
    import sys
    from pathlib import Path

    from outbox import listen, setup, worker

    database_url, table_name, finish = sys.argv[1:]
    setup(db_engine_url=database_url, table_name=table_name, poll_interval=0.1)


    @listen("event", queue="events", concurrency=1)
    async def on_event(number: int, attempt_count: int):
        print("start", number, attempt_count)
        while not Path(finish).exists():
            await asyncio.sleep(0.01)
        print("finish", number)


    print("exit", asyncio.run(worker([on_event])))
"""


async def test_the_sequence_of_the_diagram_with_real_processes(
    outbox: Outbox, database_url: str, table_name: str, tmp_path: Path
) -> None:
    finish = tmp_path / "finish"
    arguments = (database_url, table_name, str(finish))
    async with program(WORKER, *arguments) as worker:
        await emit_and_commit(outbox, 1)
        assert await worker.says() == "start 1 1"
        await emit_and_commit(outbox, 2)
        await eventually(lambda: _leases(outbox, 2))  # event 2 was sent to the worker, which has not started it

        worker.signal(signal.SIGTERM)
        await eventually(lambda: _leases(outbox, 1))  # event 2 is given back while event 1 goes on
        assert worker.runs
        await emit_and_commit(outbox, 3)

        finish.touch()
        assert await worker.says() == "finish 1"
        assert await worker.says() == "exit 0"
        code, further, _ = await worker.end()
        assert (code, further) == (0, "")
    assert await waiting_bodies(outbox) == [b"2", b"3"]
    assert await leased(outbox) == 0

    async with program(WORKER, *arguments) as other:
        said = [await other.says() for _ in range(4)]
        assert said == ["start 2 1", "finish 2", "start 3 1", "finish 3"]
        await eventually(lambda: _empty(outbox))
        other.signal(signal.SIGINT)
        assert (await other.end())[:2] == (0, "exit 0\n")


async def _leases(outbox: Outbox, count: int) -> bool:
    return await leased(outbox) == count


async def _empty(outbox: Outbox) -> bool:
    return not await outbox.messages()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_signal_gives_back_what_was_not_started_and_lets_the_running_end(
    make_outbox: MakeOutbox, number: signal.Signals, recorder: Recorder
) -> None:
    outbox, other = make_outbox(observers=[recorder]), make_outbox()
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=1)
    async def on_event(event: int) -> None:
        await started.put(event)
        await finish.wait()

    working = asyncio.create_task(outbox.worker([on_event]))
    await emit_and_commit(other, 1)
    assert await arrival(started) == 1
    await emit_and_commit(other, 2)
    await eventually(lambda: _leases(other, 2))
    signal_this_process(number)
    await eventually(lambda: _leases(other, 1))
    await emit_and_commit(other, 3)
    assert not working.done()
    finish.set()
    assert await working == 0
    assert [event.attempt.message.body for event in recorder.of(Handled)] == [b"1"]
    assert await waiting_bodies(other) == [b"2", b"3"]

    seen: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    @listen("event", queue="events")
    async def on_event_elsewhere(event: int, attempt_count: int) -> None:
        await seen.put((event, attempt_count))

    async with other.running(listeners=[on_event_elsewhere]):
        assert sorted([await arrival(seen), await arrival(seen)]) == [(2, 1), (3, 1)]


async def test_what_was_given_back_goes_to_another_worker_without_waiting_for_the_lease(
    make_outbox: MakeOutbox,
) -> None:
    leaving, staying = make_outbox(lease=60), make_outbox()
    taken: asyncio.Queue[str] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=1)
    async def leaves(event: int) -> None:
        await taken.put(f"leaving {event}")
        await finish.wait()

    @listen("event", queue="events")
    async def stays(event: int) -> None:
        await taken.put(f"staying {event}")

    async with staying.transaction() as session:
        await staying.emit_many(session, "event", [1, 2])
    working = asyncio.create_task(leaving.worker([leaves]))
    assert await arrival(taken) == "leaving 1"
    await eventually(lambda: _leases(staying, 2))
    async with staying.running(listeners=[stays]):
        signal_this_process(signal.SIGTERM)
        assert await arrival(taken) == "staying 2"
        assert not working.done()
        finish.set()
        assert await working == 0


@on_sqlite
async def test_the_worker_waits_for_all_listeners_that_are_running(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    started: asyncio.Queue[int] = asyncio.Queue()
    finished: list[int] = []
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=5)
    async def on_event(event: int) -> None:
        await started.put(event)
        await finish.wait()
        finished.append(event)

    working = asyncio.create_task(outbox.worker([on_event]))
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "event", range(5))
    for _ in range(5):
        await arrival(started)
    signal_this_process(signal.SIGTERM)
    await asyncio.wait([working], timeout=0.5)
    assert not working.done()
    finish.set()
    assert await working == 0
    assert sorted(finished) == [0, 1, 2, 3, 4]
    assert await waiting_bodies(make_outbox()) == []


@on_sqlite
async def test_a_listener_that_fails_during_the_shutdown_is_retried_as_ever(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("event", queue="events", retry_delays=(60,))
    async def on_event(event: int) -> None:
        await started.put(event)
        await finish.wait()
        raise ConnectionError("too late")

    working = asyncio.create_task(outbox.worker([on_event]))
    await emit_and_commit(outbox, 1)
    await arrival(started)
    signal_this_process(signal.SIGTERM)
    finish.set()
    await working
    [stored] = await make_outbox().messages()
    assert (stored.state, stored.attempt_count, stored.leased_until) == ("retrying", 1, None)


# A bounded grace, and a second signal


async def hanging_worker(outbox: Outbox) -> asyncio.Task[int]:
    """A worker whose listener has begun, and does not end."""
    started: asyncio.Queue[int] = asyncio.Queue()

    @listen("event", queue="events")
    async def hangs(event: int) -> None:
        await started.put(event)
        await asyncio.Event().wait()

    working = asyncio.create_task(outbox.worker([hangs]))
    await emit_and_commit(outbox, 1)
    await arrival(started)
    return working


async def test_the_end_of_the_grace_abandons_what_still_runs_and_burns_no_attempt(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(grace=0.1, observers=[recorder])
    working = await hanging_worker(outbox)
    signal_this_process(signal.SIGTERM)
    assert await asyncio.wait_for(working, PATIENCE) == 1
    assert recorder.of(Stopped) == [Stopped("worker", 1)]
    [stored] = await make_outbox().messages()
    assert (stored.state, stored.attempt_count, stored.crash_count) == ("queued", 0, 0)
    assert stored.leased_until is None


@on_sqlite
async def test_a_second_signal_does_not_wait_for_the_grace(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(grace=4 * PATIENCE)
    working = await hanging_worker(outbox)
    signal_this_process(signal.SIGTERM)
    await asyncio.wait([working], timeout=0.1)
    assert not working.done()
    signal_this_process(signal.SIGINT)
    assert await asyncio.wait_for(working, PATIENCE) == 1
    assert await waiting_bodies(make_outbox()) == [b"1"]


@on_every_driver
async def test_an_abandoned_listeners_transaction_is_rolled_back(make_outbox: MakeOutbox, user_model: Any) -> None:
    outbox = make_outbox(grace=0.1)
    started: asyncio.Queue[int] = asyncio.Queue()

    @listen("event", queue="events")
    async def hangs(event: int, session: AsyncSession) -> None:
        session.add(user_model(id=event, username="never"))
        await session.flush()
        await started.put(event)
        await asyncio.Event().wait()

    working = asyncio.create_task(outbox.worker([hangs]))
    await emit_and_commit(outbox, 1)
    await arrival(started)
    signal_this_process(signal.SIGTERM)
    assert await asyncio.wait_for(working, PATIENCE) == 1
    other = make_outbox()
    async with other.transaction() as session:
        assert await session.get(user_model, 1) is None
    assert await waiting_bodies(other) == [b"1"]


@on_sqlite
async def test_an_idle_worker_ends_at_once(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(grace=4 * PATIENCE, poll_interval=4 * PATIENCE)

    @listen("event", queue="events")
    async def on_event(event: int) -> None: ...

    working = asyncio.create_task(outbox.worker([on_event]))
    await eventually(outbox.bindings)
    signal_this_process(signal.SIGTERM)
    assert await asyncio.wait_for(working, PATIENCE) == 0


@on_sqlite
async def test_the_signal_handlers_of_the_application_are_back_afterwards(outbox: Outbox) -> None:
    @listen("event", queue="events")
    async def on_event(event: int) -> None: ...

    before = [signal.getsignal(number) for number in SIGNALS]
    working = asyncio.create_task(outbox.worker([on_event]))
    await eventually(outbox.bindings)
    signal_this_process(signal.SIGTERM)
    await working
    assert [signal.getsignal(number) for number in SIGNALS] == before


# The relay


async def test_a_relay_finishes_what_it_is_publishing_and_starts_nothing_new(
    make_outbox: MakeOutbox,
) -> None:
    published: asyncio.Queue[bytes] = asyncio.Queue()
    finish = asyncio.Event()

    async def publish(message: Message) -> None:
        await published.put(message.body)
        await finish.wait()

    outbox = make_outbox(transport=publish, batch_size=1)
    relaying = asyncio.create_task(outbox.message_relay())
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "event", range(SIDE_BY_SIDE + 2))
    assert {await arrival(published) for _ in range(SIDE_BY_SIDE)} == {b"%d" % body for body in range(SIDE_BY_SIDE)}
    signal_this_process(signal.SIGTERM)
    await asyncio.wait([relaying], timeout=0.1)
    assert not relaying.done()
    finish.set()
    await asyncio.wait_for(relaying, PATIENCE)
    assert published.empty()
    assert await waiting_bodies(make_outbox()) == [b"%d" % body for body in range(SIDE_BY_SIDE, SIDE_BY_SIDE + 2)]


async def test_leaving_the_running_block_is_a_graceful_shutdown_without_signals(
    outbox: Outbox, recorder: Recorder
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    started: asyncio.Queue[int] = asyncio.Queue()
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=1)
    async def on_event(event: int) -> None:
        await started.put(event)
        await finish.wait()

    async def finish_when_the_rest_is_given_back() -> None:
        await eventually(lambda: _leases(outbox, 1))
        finish.set()

    async with outbox.running(listeners=[on_event]):
        assert [signal.getsignal(number) for number in SIGNALS] == before
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "event", [1, 2, 3])
        assert await arrival(started) == 1
        await eventually(lambda: _leases(outbox, 2))
        finishing = asyncio.create_task(finish_when_the_rest_is_given_back())
    await finishing
    assert [event.attempt.message.body for event in recorder.of(Handled)] == [b"1"]
    assert started.empty()
    assert await waiting_bodies(outbox) == [b"2", b"3"]
    assert await leased(outbox) == 0


# Worse than a signal that can be caught


@on_sqlite
async def test_a_worker_that_is_killed_loses_nothing(
    make_outbox: MakeOutbox, database_url: str, table_name: str, tmp_path: Path
) -> None:
    source = WORKER.replace("concurrency=1)", "concurrency=1, lease=2)")
    outbox = make_outbox()
    async with program(source, database_url, table_name, str(tmp_path / "never")) as worker:
        await emit_and_commit(outbox, 1)
        assert await worker.says() == "start 1 1"
        worker.signal(signal.SIGKILL)
        assert (await worker.end())[0] == -signal.SIGKILL
    arrivals: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    @listen("event", queue="events")
    async def on_event(event: int, attempt_count: int) -> None:
        await arrivals.put((event, attempt_count))

    async with outbox.running(listeners=[on_event]):
        assert await arrival(arrivals) == (1, 1)
        await eventually(lambda: _empty(outbox))
