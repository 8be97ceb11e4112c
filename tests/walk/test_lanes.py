"""Lanes: one at a time within a lane, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import ContextVar
from datetime import datetime

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, listen
from outbox.core.events import Handled, LeaseWasLost
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch, reached

TRANSPORTS = (None, "memory://")


@pytest.fixture(params=TRANSPORTS, ids=["database", "memory"])
def transport(request: pytest.FixtureRequest) -> str | None:
    named: str | None = request.param
    return named


@pytest.fixture
def watch() -> Watch:
    return Watch()


def by_key(message: Message) -> str | None:
    return message.key


async def test_messages_of_one_lane_go_one_at_a_time_and_others_side_by_side(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    together = asyncio.Event()

    @listen("#", queue="q", lane=by_key, concurrency=4)
    async def listener(body: int, message: Message) -> None:
        lane = message.key or ""
        running[lane] += 1
        most[lane] = max(most[lane], running[lane])
        if len(+running) == 3:
            together.set()
        if not together.is_set():
            await reached(together)
        await asyncio.sleep(0.01)
        running[lane] -= 1

    async with outbox.running(relay=True, listeners=[listener]):
        for body in range(5):
            for key in ("red", "green", "blue"):
                await emit(outbox, body, key=key)
        await watch.wait_for(Handled, 15)
    assert most == {"red": 1, "green": 1, "blue": 1}


async def test_what_waits_for_its_lane_holds_no_slot(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    """More messages of one lane than there are slots come first; one of another lane passes all of them."""
    outbox = make_outbox(transport=transport, observers=[watch])
    release, passed = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    @listen("#", queue="q", lane=by_key, concurrency=2)
    async def listener(body: int, message: Message) -> None:
        if message.key == "slow":
            await reached(release)
        else:
            passed.set()
        done.append(body)

    await emit(outbox, *range(50), key="slow")
    await emit(outbox, 100, key="quick")
    async with outbox.running(relay=True, listeners=[listener]):
        await reached(passed)
        assert done == [] or done == [100]
        release.set()
        await watch.wait_for(Handled, 51)
    assert done == [100, *range(50)], "and a lane keeps the order in which its messages came"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_at_rabbitmq_too_one_lane_does_not_keep_others_from_coming(
    make_outbox: MakeOutbox, watch: Watch, rabbitmq_url: str
) -> None:
    outbox = make_outbox(transport=rabbitmq_url, observers=[watch])
    release, passed = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q", lane=by_key, concurrency=2)
    async def listener(body: int, letter: Message) -> None:
        if letter.key == "slow":
            await reached(release)
        else:
            passed.set()

    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, *range(100), key="slow")
        await emit(outbox, 100, key="quick")
        await reached(passed)
        assert watch.of(Handled)[1:] == []
        release.set()
        await watch.wait_for(Handled, 101)


async def test_without_a_lane_messages_wait_for_nobody(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    started = 0
    all_started = asyncio.Event()

    @listen("#", queue="q", lane=lambda message: None, concurrency=3)
    async def listener(body: int) -> None:
        nonlocal started
        started += 1
        if started == 3:
            all_started.set()
        await reached(all_started)

    await emit(outbox, 1, 2, 3)
    async with outbox.running(relay=True, listeners=[listener]):
        await watch.wait_for(Handled, 3)


async def test_the_lease_on_what_waits_for_its_lane_is_renewed(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch], lease=6)
    release = asyncio.Event()

    @listen("#", queue="q", lane="only", concurrency=2)
    async def listener(body: int) -> None:
        await reached(release)

    async def leases() -> list[datetime]:
        held = [each.leased_until for each in await outbox.messages(queue="q")]
        return [until for until in held if until is not None]

    await emit(outbox, 1, 2, 3)
    async with outbox.running(listeners=[listener]), asyncio.timeout(PATIENCE):
        while len(first := await leases()) < 3:
            await asyncio.sleep(0.05)
        while min(await leases()) <= max(first):
            await asyncio.sleep(0.05)
        release.set()
        await watch.wait_for(Handled, 3)
    assert watch.of(LeaseWasLost) == []


async def test_a_worker_that_stops_gives_back_what_waits_for_its_lane(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch], grace=0.5)
    started = asyncio.Event()
    seen: list[int] = []

    @listen("#", queue="q", lane="only", concurrency=2)
    async def stuck(body: int) -> None:
        seen.append(body)
        started.set()
        await asyncio.sleep(3600)

    @listen("#", queue="q", lane="only")
    async def quick(body: int) -> None:
        seen.append(body)

    await emit(outbox, 1, 2, 3)
    async with outbox.running(relay=True, listeners=[stuck]):
        await reached(started)
    async with outbox.running(relay=True, listeners=[quick]):
        await watch.wait_for(Handled, 3)
    assert seen[0] == 1 and sorted(seen[1:]) == [1, 2, 3]
    assert [event.attempt.attempt_count for event in watch.of(Handled)][-3:] == [1, 1, 1], "nobody's attempt was burnt"


async def test_a_lane_that_cannot_be_told_is_a_failed_attempt(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    calls: list[int] = []

    def lane(message: Message) -> str | None:
        if message.key == "bad":
            raise KeyError("no such customer")
        return 5 if message.key == "odd" else "fine"  # type: ignore[return-value]

    @listen("#", queue="q", lane=lane, retry_delays=())
    async def listener(body: int) -> None:
        calls.append(body)

    await emit(outbox, 1, key="bad")
    await emit(outbox, 2, key="odd")
    await emit(outbox, 3)
    async with outbox.running(relay=True, listeners=[listener]):
        await watch.wait_for(Handled, 3)
    letters = await outbox.dead_letters.list()
    assert sorted(letter.message.body for letter in letters) == [b"1", b"2"]
    assert {letter.error.splitlines()[0].split(":")[0] for letter in letters} == {"KeyError", "ConfigurationError"}
    assert calls == [3]


async def test_what_a_listener_leaves_in_its_context_does_not_reach_the_next_of_its_lane(
    make_outbox: MakeOutbox, watch: Watch
) -> None:
    outbox = make_outbox(observers=[watch])
    left: ContextVar[int] = ContextVar("left", default=0)
    found: list[int] = []

    @listen("#", queue="q", lane="only", concurrency=2)
    async def listener(body: int) -> None:
        found.append(left.get())
        left.set(body)

    await emit(outbox, 1, 2, 3)
    async with outbox.running(listeners=[listener]):
        await watch.wait_for(Handled, 3)
    assert found == [0, 0, 0]


async def test_a_failed_message_leaves_its_lane(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None, table_name: str
) -> None:
    """In a session too, and after a retry the message waits for its lane like any other."""
    outbox = make_outbox(transport=transport, observers=[watch])
    effects = Effects(outbox, table_name)
    await effects.create()

    @listen("#", queue="q", lane=by_key, retry_delays=(0,))
    async def listener(body: int, session: AsyncSession, attempt_count: int) -> None:
        await session.execute(effects.write(f"{body}"))
        if body == 1 and attempt_count == 1:
            raise OSError("the first attempt fails")

    await emit(outbox, 1, 2, 3, key="one")
    async with outbox.running(relay=True, listeners=[listener]):
        await watch.wait_for(Handled, 4)
    assert sorted(await effects.all()) == ["1", "2", "3"]
