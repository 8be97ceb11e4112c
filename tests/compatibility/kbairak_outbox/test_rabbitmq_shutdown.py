"""Over RabbitMQ: "Graceful shutdown", its sequence diagram included, with real processes and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from aio_pika.abc import AbstractChannel

from outbox import Outbox, listen
from outbox.core.events import Handled, Relayed
from tests.support.databases import ASYNCPG, SQLITE, on_sqlite
from tests.support.observing import PATIENCE, Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.program import program
from tests.support.queues import is_empty, taken

from .users import Arrivals


async def publish(outbox: Outbox, recorder: Recorder, number: int) -> None:
    """Emit an event; on return it is in the queue."""
    sent = len(recorder.of(Relayed))
    async with outbox.transaction() as session:
        await outbox.emit(session, "event", number)
    await recorder.wait_for(Relayed, sent + 1)


def signal_this_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


WORKER = """
    import asyncio
    import sys
    from pathlib import Path

    from outbox import listen, setup, worker

    rabbitmq_url, finish = sys.argv[1:]
    setup(rabbitmq_url=rabbitmq_url)


    @listen("event", queue="events", concurrency=1, retry_delays=())
    async def on_event(number: int, attempt_count: int, message):
        print("start", number, attempt_count, "again" if message.redelivered else "first")
        while not Path(finish).exists():
            await asyncio.sleep(0.01)
        print("finish", number)


    print("exit", asyncio.run(worker([on_event])))
"""


async def _declare(rabbitmq_url: str) -> None:
    """Have the worker's queue before anything is published."""

    @listen("event", queue="events", concurrency=1, retry_delays=())
    async def on_event(number: int) -> None: ...

    async with Outbox(rabbitmq_url=rabbitmq_url).running(listeners=[on_event]):
        pass


@pytest.mark.parametrize(
    ("database_url", "number"),
    [(SQLITE, signal.SIGTERM), (ASYNCPG, signal.SIGINT)],
    indirect=["database_url"],
    ids=["sqlite and SIGTERM", "asyncpg and SIGINT"],
)
async def test_the_sequence_of_the_diagram_with_real_processes(
    rabbitmq_outbox: Outbox,
    recorder: Recorder,
    rabbitmq_url: str,
    channel: AbstractChannel,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    finish = tmp_path / "finish"
    await _declare(rabbitmq_url)
    async with rabbitmq_outbox.running(relay=True):
        async with program(WORKER, rabbitmq_url, str(finish)) as worker:
            await publish(rabbitmq_outbox, recorder, 1)
            assert await worker.says() == "start 1 1 first"
            await publish(rabbitmq_outbox, recorder, 2)
            await eventually(lambda: is_empty(channel, "events"))  # event 2 is in the worker's hands

            worker.signal(number)
            await eventually(lambda: _is_back(channel, "events"))  # event 2, while event 1 goes on
            assert worker.runs
            await publish(rabbitmq_outbox, recorder, 3)

            finish.touch()
            assert await worker.says() == "finish 1"
            assert await worker.says() == "exit 0"
            assert (await worker.end())[:2] == (0, "")

        async with program(WORKER, rabbitmq_url, str(finish)) as other:
            said = [await other.says() for _ in range(4)]
            assert said == ["start 2 1 again", "finish 2", "start 3 1 first", "finish 3"]
            other.signal(number)
            assert (await other.end())[:2] == (0, "exit 0\n")
    assert await is_empty(channel, "events")  # each of them was acknowledged


async def _is_back(channel: AbstractChannel, queue: str) -> bool:
    return not await is_empty(channel, queue)


@on_sqlite
async def test_what_is_given_back_goes_to_another_worker_at_once_and_burns_no_attempt(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    leaving, staying = make_rabbitmq_outbox(), make_rabbitmq_outbox()
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=1, retry_delays=())
    async def leaves(event: int) -> None:
        arrivals.put_nowait(("leaving", event))
        await finish.wait()

    @listen("event", queue="events", retry_delays=())
    async def stays(event: int, attempt_count: int) -> None:
        arrivals.put_nowait(("staying", event, attempt_count))

    async with staying.running(listeners=[stays]):
        pass
    working = asyncio.create_task(leaving.worker([leaves]))
    async with staying.running(relay=True):
        await publish(staying, recorder, 1)
        assert await arrival(arrivals) == ("leaving", 1)
        await publish(staying, recorder, 2)
        await eventually(lambda: is_empty(channel, "events"))  # event 2 is in the worker's hands
    async with staying.running(listeners=[stays]):
        signal_this_process(signal.SIGTERM)
        assert await arrival(arrivals) == ("staying", 2, 1)
        assert not working.done()
        finish.set()
        assert await asyncio.wait_for(working, PATIENCE) == 0
    assert arrivals.empty()


@on_sqlite
async def test_all_that_run_come_to_their_end_and_a_failure_among_them_is_retried_as_ever(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    outbox, producer = make_rabbitmq_outbox(), make_rabbitmq_outbox()
    finish = asyncio.Event()

    @listen("event", queue="events", concurrency=3, retry_delays=(300,))
    async def on_event(event: int) -> None:
        arrivals.put_nowait(event)
        await finish.wait()
        if event == 2:
            raise ConnectionError("too late")

    async with producer.running(listeners=[on_event]):
        pass
    working = asyncio.create_task(outbox.worker([on_event]))
    async with producer.running(relay=True):
        for number in (1, 2, 3):
            await publish(producer, recorder, number)
        assert sorted([await arrival(arrivals) for _ in range(3)]) == [1, 2, 3]
    signal_this_process(signal.SIGINT)
    await asyncio.wait([working], timeout=0.2)
    assert not working.done()
    finish.set()
    assert await asyncio.wait_for(working, PATIENCE) == 0
    assert len(recorder.of(Handled)) == 3
    assert (await taken(channel, "outbox.delay_300s")).body == b"2"
    assert await is_empty(channel, "events")


@on_sqlite
async def test_the_end_of_the_grace_abandons_what_still_runs_and_it_comes_again(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, arrivals: Arrivals
) -> None:
    leaving, staying = make_rabbitmq_outbox(grace=0.1), make_rabbitmq_outbox()
    hangs = True

    @listen("event", queue="events", retry_delays=())
    async def on_event(event: int, attempt_count: int) -> None:
        arrivals.put_nowait((event, attempt_count))
        if hangs:
            await asyncio.Event().wait()

    async with staying.running(listeners=[on_event]):
        pass
    working = asyncio.create_task(leaving.worker([on_event]))
    async with staying.running(relay=True):
        await publish(staying, recorder, 1)
        assert await arrival(arrivals) == (1, 1)
    signal_this_process(signal.SIGTERM)
    assert await asyncio.wait_for(working, PATIENCE) == 1
    hangs = False
    async with staying.running(listeners=[on_event]):
        assert await arrival(arrivals) == (1, 1)


# Worse than a signal that can be caught: "Network issues or worker restarts", "RabbitMQ redeliveries"


@on_sqlite
async def test_a_worker_that_is_killed_loses_nothing(
    rabbitmq_outbox: Outbox, recorder: Recorder, rabbitmq_url: str, channel: AbstractChannel, tmp_path: Path
) -> None:
    await _declare(rabbitmq_url)
    async with rabbitmq_outbox.running(relay=True):
        async with program(WORKER, rabbitmq_url, str(tmp_path / "never")) as worker:
            await publish(rabbitmq_outbox, recorder, 1)
            assert await worker.says() == "start 1 1 first"
            worker.signal(signal.SIGKILL)
            assert (await worker.end())[0] == -signal.SIGKILL
        finish = tmp_path / "finish"
        finish.touch()
        async with program(WORKER, rabbitmq_url, str(finish)) as other:
            assert [await other.says(), await other.says()] == ["start 1 1 again", "finish 1"]
            other.signal(signal.SIGTERM)
            assert (await other.end())[0] == 0
    assert await is_empty(channel, "events")
