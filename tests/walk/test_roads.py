"""Roads: the functions that one message passes, as a profiler finds them and as the architecture page tells them.

Each road is walked by single messages in a process that has warmed up and does nothing else. `pytest -s` shows the
numbers of the table "Files and calls per message"; with OUTBOX_ROADS=1 every call, for whoever writes the lists anew.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Outbox
from outbox.core.events import Event, Handled, Relayed
from outbox.transports.http import HttpTransport
from tests.support.observing import PATIENCE
from tests.support.sending import serving

from .profiling import PACKAGE, Profiler, Walk
from .roads import Road, Step, counts, roads

MOST_STEPS = 20
WARM_UP, ENOUGH, MOST = 8, 5, 25  # messages: to begin with, that met no poll on their way, and to try for that
BETWEEN_POLLS = 1.0  # seconds after a message: those that come after 0.05, 0.1, 0.2 and 0.4 are over, that of 0.8 not

# Files that a message may pass, and calls of our functions: what a change saves is taken off here, in the same commit.
MOST_FILES = {
    "The database on SQLite": 40,
    "The database on PostgreSQL": 42,
    "RabbitMQ": 56,
    "HTTP out and HTTP in": 65,
}
# How often a road comes back to files that it was in, before the settlement, all together: what is saved is taken off.
MOST_RETURNS = {
    "The database on SQLite": 201,
    "The database on PostgreSQL": 206,
    "RabbitMQ": 172,
    "HTTP out and HTTP in": 362,
}
# Files that one emit comes back to, from its call to the commit: today's exceptions, and no others may join them.
_ON_POSTGRESQL = {
    "core/message.py",  # its ids: when it is made, written and observed
    "core/transaction_state.py",  # the driver is watched from the session's first statement on, then judged
    "outbound/after_commit.py",  # hears of the session's first statement, then what is to follow the commit
    "outbound/emitter.py",  # makes the message, its schedule, and writes it
    "stores/postgresql/dialect.py",  # what the driver says of the transaction, and what the server would
    "stores/rows.py",
}
EMIT_RETURNS_TO: dict[str, set[str]] = {
    "The database on SQLite": {
        *(_ON_POSTGRESQL - {"stores/postgresql/dialect.py"}),
        "inbound/transaction_guard.py",  # sees each statement, also the BEGIN
        "stores/callers.py",
        "stores/sqlite/dialect.py",
        "stores/sqlite/engines.py",  # begins the transaction, and compares before and after each statement
    },
    "The database on PostgreSQL": _ON_POSTGRESQL,
    "RabbitMQ": _ON_POSTGRESQL,
    "HTTP out and HTTP in": _ON_POSTGRESQL,
}
LOOSELY = 1.25  # polls and timers add calls on a machine that has much else to do

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
QUIET: dict[str, Any] = {"poll_interval": 60.0}  # wake-ups come at once, and nothing else does


@dataclass
class Course:
    """Where a message is emitted, and what tells that it has arrived."""

    emitting: Outbox
    end: Ending


@dataclass
class Ending:
    """An observer: the walk ends when all that must be written for a message is written."""

    profiler: Profiler
    awaited: tuple[type, ...]
    seen: set[type] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.awaited):
            self.seen.add(type(event))
            if self.seen >= {*self.awaited}:
                self.profiler.end()
                self.over.set()

    def begin(self) -> Walk:
        self.seen.clear()
        self.over.clear()
        return self.profiler.begin()


async def bill(order: dict[str, Any], session: AsyncSession) -> None:
    await session.execute(text("SELECT 1"))


LISTENER = Listener("order.created", bill, queue="billing")


@asynccontextmanager
async def through_the_database(profiler: Profiler, url: str, table_name: str, _: Any) -> AsyncIterator[Course]:
    end = Ending(profiler, (Handled,))
    outbox = Outbox(db_engine_url=url, table_name=table_name, observers=[end], **QUIET)
    async with outbox.running(listeners=[LISTENER]):
        yield Course(outbox, end)
    await outbox.close()


@asynccontextmanager
async def over_rabbitmq(profiler: Profiler, url: str, table_name: str, broker: str) -> AsyncIterator[Course]:
    end = Ending(profiler, (Relayed, Handled))
    outbox = Outbox(db_engine_url=url, table_name=table_name, transport=broker, observers=[end], **QUIET)
    async with outbox.running(relay=True, listeners=[LISTENER]):
        yield Course(outbox, end)
    await outbox.close()


@asynccontextmanager
async def over_http(profiler: Profiler, url: str, table_name: str, _: Any) -> AsyncIterator[Course]:
    end = Ending(profiler, (Relayed, Handled))
    receiving = Outbox(db_engine_url=url, table_name=f"{table_name}_in", observers=[end], **QUIET)
    async with serving(receiving.http_app([LISTENER], secrets=SECRET)) as server:
        transport = HttpTransport(f"http://127.0.0.1:{server.port}/", secrets=SECRET)
        sending = Outbox(db_engine_url=url, table_name=table_name, transport=transport, observers=[end], **QUIET)
        async with sending.running(relay=True):
            yield Course(sending, end)
        await sending.close()
    await receiving.close()


WAYS: dict[str, tuple[str, Callable[..., AbstractAsyncContextManager[Course]]]] = {
    "The database on SQLite": ("sqlite", through_the_database),
    "The database on PostgreSQL": ("postgresql", through_the_database),
    "RabbitMQ": ("postgresql", over_rabbitmq),
    "HTTP out and HTTP in": ("postgresql", over_http),
}


@pytest.fixture(scope="module")
def told() -> dict[str, Road]:
    return roads()


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@asynccontextmanager
async def course_of(name: str, folder: Path, table_name: str, request: pytest.FixtureRequest) -> AsyncIterator[Course]:
    database, way = WAYS[name]
    url = f"sqlite+aiosqlite:///{folder / 'outbox.db'}"
    if database == "postgresql":
        url = request.getfixturevalue("postgresql_url").replace("postgresql://", "postgresql+asyncpg://", 1)
    broker = request.getfixturevalue("rabbitmq_url") if way is over_rabbitmq else None
    with Profiler() as profiler:
        async with way(profiler, url, table_name, broker) as course:
            yield course


async def walked(course: Course) -> Walk:
    walk = course.end.begin()
    async with course.emitting.transaction() as session:
        await course.emitting.emit(session, "order.created", {"total": 1})
    async with asyncio.timeout(PATIENCE):
        await course.end.over.wait()
    return walk


_walked: dict[str, list[Walk]] = {}


async def walks_of(road: Road, folder: Path, table_name: str, request: pytest.FixtureRequest) -> list[Walk]:
    """What messages passed on this road, walked once for all tests of a process."""
    if road.name not in _walked:
        async with course_of(road.name, folder, table_name, request) as course:
            _walked[road.name] = await undisturbed(course, road)
    return _walked[road.name]


async def undisturbed(course: Course, road: Road) -> list[Walk]:
    """What messages passed that met no poll on their way: one that is under way takes a message before it is woken."""
    for _ in range(WARM_UP):
        await walked(course)
    walks: list[Walk] = []
    first: Step | None = None
    for _ in range(MOST):
        await asyncio.sleep(BETWEEN_POLLS)
        walk = await walked(course)
        gaps = [gap for side in road.sides if (gap := missed(side, walk.calls)) is not None]
        if os.environ.get("OUTBOX_ROADS"):
            print("\n".join(f"{file} {function}" for file, function in walk.calls))
        if gaps:
            first = first or gaps[0]
        else:
            walks.append(walk)
        if len(walks) >= ENOUGH and fewest_calls(walks) <= counts()[road.name].calls * LOOSELY:
            break
    assert len(walks) >= ENOUGH, f"{road.name}: {first} is not passed, or not behind the step before it"
    return walks


def files_of_most(walks: list[Walk]) -> frozenset[str]:
    """What belongs to the road is passed each time; what fell due meanwhile, as a clean-up does, is not."""
    passes = Counter(file for walk in walks for file in walk.files)
    return frozenset(file for file, count in passes.items() if 2 * count > len(walks))


def fewest_calls(walks: list[Walk]) -> int:
    return min(len(walk.calls) for walk in walks)


async def test_a_message_passes_what_the_page_tells(
    name: str, told: dict[str, Road], tmp_path: Path, table_name: str, request: pytest.FixtureRequest
) -> None:
    road = told[name]
    walks = await walks_of(road, tmp_path, table_name, request)
    passed = files_of_most(walks) - road.at_times
    calls = fewest_calls(walks)
    print(f"\n{name}: {len(passed)} files, {calls} calls per message")
    print("Files: " + ", ".join(f"`{file}`" for file in sorted(passed)) + ".")
    assert passed - road.files == set(), "the message passes these too: the page's list of files has to name them"
    assert road.files - passed == set(), "the message passes these no more: the page's list of files names them"
    assert len(passed) <= MOST_FILES[name]
    assert calls <= counts()[name].calls * LOOSELY


def missed(steps: tuple[Step, ...], calls: list[Step]) -> Step | None:
    """The first step that is not found behind the one before it."""
    left = iter(calls)
    return next((step for step in steps if step not in left), None)


def test_a_road_has_few_steps_and_no_gap(told: dict[str, Road]) -> None:
    assert {*told} == {*WAYS}
    for road in told.values():
        assert road.numbers == tuple(range(1, len(road.numbers) + 1)), road.name
        assert 5 <= len(road.steps) <= MOST_STEPS, road.name
        assert {file for file, _ in road.steps} <= road.files, road.name
        assert all((PACKAGE / file).exists() for file in road.files | road.at_times), road.name
        assert not road.files & road.at_times, road.name


async def test_a_road_comes_back_to_no_more_files_than_today(
    name: str, told: dict[str, Road], tmp_path: Path, table_name: str, request: pytest.FixtureRequest
) -> None:
    walks = await walks_of(told[name], tmp_path, table_name, request)
    settled = [walk.entered_again(end=walk.calls.index(told[name].settlement)) for walk in walks]
    fewest = min(settled, key=Counter.total)
    print(f"\n{name}: {fewest.total()} returns: " + ", ".join(f"{file} {n}" for file, n in fewest.most_common()))
    assert fewest.total() <= MOST_RETURNS[name] * LOOSELY


async def test_an_emit_goes_down_once_and_comes_back_once(
    name: str, told: dict[str, Road], tmp_path: Path, table_name: str, request: pytest.FixtureRequest
) -> None:
    walks = await walks_of(told[name], tmp_path, table_name, request)
    again = [{*walk.entered_again(*emit_in(walk))} for walk in walks]
    print(f"\n{name}: an emit comes back to " + (", ".join(sorted(set.intersection(*again))) or "nothing"))
    assert set.intersection(*again) - EMIT_RETURNS_TO[name] == set(), "it enters these more than once"
    assert EMIT_RETURNS_TO[name] - set[object]().union(*again) == set(), "it enters these only once: take them off"


def emit_in(walk: Walk) -> tuple[int, int]:
    """From which call on, and up to which, a message is emitted."""
    begin = walk.calls.index(("emitting.py", "Emitting.emit"))
    return begin, walk.calls.index(("outbound/after_commit.py", "_session_committing"), begin)


def test_the_table_of_counts_is_that_of_the_bounds() -> None:
    assert {name: count.files for name, count in counts().items()} == MOST_FILES
