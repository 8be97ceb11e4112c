"""After a crash: what the dead process held comes back at once and together, and no message dies of another's crash."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from sqlalchemy import make_url

from outbox import Binding, Listener, Message, Outbox, listen
from outbox.core.store import Selection, Wanted
from outbox.inbound import concurrency
from tests.support.observing import PATIENCE, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox, emit
from tests.support.proxy import Link, Proxy

ROOT = Path(__file__).parents[2]

LEASE = 1.0
HOUR = timedelta(hours=1)
WITHIN = 3 * 1.0  # seconds after the lease's end: three times what is promised

HANGING_RELAY = """
import asyncio, json, sys
from outbox import Outbox

async def publish(message):
    print("in flight", flush=True)
    await asyncio.sleep(3600)

asyncio.run(Outbox(transport=publish, **json.loads(sys.argv[1])).message_relay())
"""


@asynccontextmanager
async def process(program: str, options: dict[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is killed at the end of the block, if it still lives."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, json.dumps(options), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE):
            yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_what_a_killed_relay_had_in_flight_goes_out_together_and_delays_no_fresh_message(
    database_url: str, table_name: str
) -> None:
    options: dict[str, Any] = {
        "db_engine_url": database_url,
        "table_name": table_name,
        "poll_interval": 0.2,
        "lease": LEASE,
    }
    arrived: dict[Any, float] = {}

    async def publish(message: Message) -> None:
        arrived.setdefault(json.loads(message.body), time.monotonic())
        await asyncio.sleep(0.05)  # one by one they would take far too long

    outbox = Outbox(transport=publish, **options)
    await outbox.create_tables()
    await emit(outbox, *range(600))
    async with process(HANGING_RELAY, options) as doomed:
        assert doomed.stdout is not None
        for _ in range(500):
            assert await doomed.stdout.readline()
        doomed.kill()
    lease_ends = time.monotonic() + LEASE
    emitted: dict[Any, float] = {}
    async with outbox.running(relay=True):
        while len(arrived) - len(emitted) < 600 or time.monotonic() < lease_ends:
            fresh = f"fresh {len(emitted)}"
            await emit(outbox, fresh)
            emitted[fresh] = time.monotonic()
            await eventually(lambda: fresh in arrived)  # noqa: B023
            assert arrived[fresh] - emitted[fresh] < WITHIN
            await asyncio.sleep(0.1)
    assert max(arrived[body] for body in range(600)) - lease_ends < WITHIN
    assert await outbox.messages() == []
    await outbox.close()


# Claims without an answer.


@pytest.fixture
def link(postgresql_url: str) -> Iterator[Link]:
    with Proxy() as proxy:
        yield proxy.link("claims", make_url(postgresql_url).port or 5432)


@pytest.fixture(params=["asyncpg", "psycopg"])
async def cut_off(
    request: pytest.FixtureRequest, postgresql_url: str, table_name: str, link: Link
) -> AsyncIterator[Outbox]:
    """An outbox whose connections can be cut when the server has answered and the answer has not arrived."""
    url = make_url(postgresql_url).set(drivername=f"postgresql+{request.param}", host="127.0.0.1", port=link.port)
    outbox = Outbox(db_engine_url=url.render_as_string(hide_password=False), table_name=table_name)
    await outbox.store.queues.bind([Binding("q", "#")])
    yield outbox
    await outbox.close()


async def given_back(outbox: Outbox) -> None:
    """Wait until nothing is leased."""

    async def unleased() -> bool:
        return all(stored.leased_until is None for stored in await outbox.messages())

    await eventually(unleased)


async def test_a_claim_whose_answer_is_lost_is_given_back_and_counts_as_no_crash(cut_off: Outbox, link: Link) -> None:
    await emit(cut_off, *range(3))
    await cut_off.store.queues.route(10, {})
    for _ in range(3):
        link.trip_at(["UPDATE"])
        with pytest.raises(Exception):  # noqa: B017 - whatever the driver says of a cut connection
            async with cut_off.store.feed.claim(Selection(limit=10, lease=HOUR, destination="q")):
                pass
        assert link.tripped.is_set()
        await given_back(cut_off)
    async with cut_off.store.feed.claim(Selection(limit=10, lease=HOUR, destination="q")) as claim:
        assert [attempt.crash_count for attempt in claim.attempts] == [0, 0, 0]


@pytest.mark.parametrize("known", [True, False], ids=["in one statement", "in a transaction"])
async def test_a_hand_over_whose_answer_is_lost_is_given_back_and_counts_as_no_crash(
    cut_off: Outbox, link: Link, known: bool
) -> None:
    wanted = {"q": Wanted(10, HOUR)}
    if known:  # the router has seen this routing key before
        await emit(cut_off, "before")
        await cut_off.store.queues.route(10, {})
    await emit(cut_off, *range(3))
    link.trip_at(["UPDATE"] if known else ["COMMIT"])
    with pytest.raises(Exception):  # noqa: B017 - whatever the driver says of a cut connection
        await cut_off.store.queues.route(10, {}, wanted)
    assert link.tripped.is_set()
    await given_back(cut_off)
    async with cut_off.store.feed.claim(Selection(limit=10, lease=HOUR, destination="q")) as claim:
        assert [attempt.crash_count for attempt in claim.attempts] == [0] * (3 + known)


# A run that could end as `crashed`.

POISONED_WORKER = """
import asyncio, json, os, sys
from outbox import Outbox, listen

@listen("innocent", queue="innocent")
async def innocent(body: str) -> None:
    await asyncio.sleep(0.5)
    print("innocent", flush=True)

@listen("poison", queue="poison")
async def poison(body: int) -> None:
    await asyncio.sleep(0.2)
    os._exit(1)

asyncio.run(Outbox(**json.loads(sys.argv[1])).worker([innocent, poison]))
"""


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)
async def test_a_message_does_not_die_of_the_crashes_of_other_messages(database_url: str, table_name: str) -> None:
    options: dict[str, Any] = {"db_engine_url": database_url, "table_name": table_name, "poll_interval": 0.2}
    outbox = Outbox(**options)
    await outbox.store.queues.bind([Binding(name, name) for name in ("innocent", "poison")])
    async with outbox.transaction() as session:
        await outbox.emit(session, "innocent", "innocent")
    for number in range(3):
        async with outbox.transaction() as session:
            await outbox.emit(session, "poison", number)
        async with process(POISONED_WORKER, options) as doomed:
            assert await doomed.wait() == 1
        await let_leases_run_out(outbox)
    while not await handled(outbox, "innocent"):
        async with process(POISONED_WORKER, options) as worker:  # until a poisonous one has killed it again
            await eventually(lambda: worker.returncode is not None or handled(outbox, "innocent"))
        await let_leases_run_out(outbox)
    assert [letter for letter in await outbox.dead_letters.list() if letter.queue == "innocent"] == []
    await outbox.close()


async def test_a_message_does_not_die_of_the_crashes_of_other_messages_over_rabbitmq(
    rabbitmq_url: str, table_name: str
) -> None:
    options: dict[str, Any] = {
        "rabbitmq_url": rabbitmq_url,
        "exchange_name": table_name,
        "queue_prefix": f"{table_name}.",
    }
    outbox = Outbox(**options)
    await outbox.transport.open()
    await outbox.transport.declare([Listener(name, print, queue=name) for name in ("innocent", "poison")])
    await outbox.transport.publish([Message(routing_key="innocent", body=b'"innocent"')])
    for _ in range(2):  # it comes back as if a worker had died of another message
        async with await aio_pika.connect(rabbitmq_url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(f"{table_name}.innocent")
            await eventually(lambda: queue.get(fail=False))  # noqa: B023
    await outbox.transport.publish([Message(routing_key="poison", body=b"0")])
    said = b""
    while b"innocent" not in said:
        async with process(POISONED_WORKER, options) as doomed:
            assert doomed.stdout is not None
            said = await doomed.stdout.readline()
        assert await outbox.dead_letters.list(queue="innocent") == []
    assert await outbox.dead_letters.list(queue="innocent") == []
    await outbox.close()


async def test_suspects_that_cannot_be_tried_hold_up_no_fresh_message_over_rabbitmq(
    rabbitmq_url: str, table_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "SHORTEST_WAIT", 0.5)
    outbox = Outbox(
        rabbitmq_url=rabbitmq_url, exchange_name=table_name, queue_prefix=f"{table_name}.", retry_delays=(1,)
    )
    started, release = asyncio.Event(), asyncio.Event()
    handled: set[str] = set()

    @listen("long", queue="long")
    async def long(body: str) -> None:
        started.set()
        await release.wait()

    @listen("short", queue="short", concurrency=2)
    async def short(body: str) -> None:
        handled.add(body)

    suspects = {f"suspect {number}" for number in range(6)}  # more than the least prefetch
    await outbox.transport.open()
    await outbox.transport.declare([long, short])
    await outbox.transport.publish([Message(routing_key="short", body=json.dumps(each).encode()) for each in suspects])
    for _ in range(2):  # they come back as if a worker had died of another message
        async with await aio_pika.connect(rabbitmq_url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(f"{table_name}.short")
            for _ in suspects:
                await eventually(lambda: queue.get(fail=False))  # noqa: B023
    await outbox.transport.publish([Message(routing_key="long", body=b'"long"')])
    async with outbox.running(listeners=[long, short]):
        await started.wait()
        await asyncio.sleep(1.0)  # the first one has waited in vain, and for others there was no need to
        await outbox.transport.publish([Message(routing_key="short", body=b'"fresh"')])
        async with asyncio.timeout(2.0):
            await eventually(lambda: "fresh" in handled)
        release.set()
        await eventually(lambda: handled >= suspects)
    assert await outbox.dead_letters.list() == []
    await outbox.close()


async def handled(outbox: Outbox, queue: str) -> bool:
    return await outbox.messages(queue=queue) == []


class Runs:
    """Which messages run side by side."""

    def __init__(self) -> None:
        self.running: set[object] = set()
        self.beside: dict[object, set[object]] = {}
        self.ended: list[object] = []

    async def run(self, name: object, seconds: float) -> None:
        for other in self.running:
            self.beside[other].add(name)
        self.beside[name] = set(self.running)
        self.running.add(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running.discard(name)
            self.ended.append(name)


@pytest.fixture
async def last_chance(make_outbox: MakeOutbox) -> Outbox:
    """An outbox with a message that crashed twice, and fresh ones in another queue."""
    outbox = make_outbox(poll_interval=0.2)
    await outbox.store.queues.bind([Binding(name, name) for name in ("suspected", "fresh")])
    async with outbox.transaction() as session:
        await outbox.emit(session, "suspected", "suspected")
        await outbox.emit_many(session, "fresh", list(range(30)))
    await outbox.store.queues.route(100, {})
    for _ in range(2):
        async with outbox.store.feed.claim(Selection(limit=1, lease=HOUR, destination="suspected")):
            await let_leases_run_out(outbox)
    return outbox


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_run_that_could_end_as_crashed_has_the_process_to_itself(last_chance: Outbox) -> None:
    runs = Runs()

    @listen("suspected", queue="suspected")
    async def suspected(body: str) -> None:
        await runs.run(body, 0.2)

    @listen("fresh", queue="fresh", concurrency=3)
    async def fresh(body: int) -> None:
        await runs.run(body, 0.05)

    async with last_chance.running(listeners=[suspected, fresh]):
        await eventually(lambda: len(runs.ended) == 31)
    assert runs.beside["suspected"] == set()
    assert any(runs.beside[number] for number in range(30)), "all others run side by side"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_long_run_beside_it_holds_up_neither_fresh_messages_nor_the_run_that_has_to_be_alone_for_good(
    last_chance: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "SHORTEST_WAIT", 0.1)
    runs, release = Runs(), asyncio.Event()

    @listen("suspected", queue="suspected")
    async def suspected(body: str) -> None:
        await runs.run(body, 0.01)

    @listen("fresh", queue="fresh", concurrency=3)
    async def fresh(body: int) -> None:
        await runs.run(body, 0.02)
        if body == 0:
            await release.wait()

    elsewhere = last_chance.store.feed.claim(Selection(limit=1, lease=HOUR, destination="suspected", isolated_at=2))
    await elsewhere.__aenter__()
    async with last_chance.running(listeners=[suspected, fresh]):
        await eventually(lambda: 0 in runs.ended)
        await elsewhere.__aexit__(None, None, None)
        await eventually(lambda: len(runs.ended) == 30)
        assert "suspected" not in runs.ended
        [stored] = await last_chance.messages(queue="suspected")
        assert stored.crash_count == 2
        release.set()
        await eventually(lambda: "suspected" in runs.ended)
