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

import pytest
from sqlalchemy import make_url

from outbox import Binding, Message, Outbox
from outbox.core.store import Wanted
from tests.chaos.proxy import Link, Proxy
from tests.seeds.observing import PATIENCE, eventually

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


async def emit(outbox: Outbox, *bodies: object) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", list(bodies))


async def test_what_a_killed_relay_had_in_flight_goes_out_together_and_delays_no_fresh_message(
    database_url: str, table_name: str
) -> None:
    options = {"db_engine_url": database_url, "table_name": table_name, "poll_interval": 0.2, "lease": LEASE}
    arrived: dict[Any, float] = {}

    async def publish(message: Message) -> None:
        arrived.setdefault(json.loads(message.body), time.monotonic())

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
    await outbox.store.bind([Binding("q", "#")])
    yield outbox
    await outbox.close()


async def given_back(outbox: Outbox) -> None:
    """Wait until nothing is leased."""

    async def unleased() -> bool:
        return all(stored.leased_until is None for stored in await outbox.messages())

    await eventually(unleased)


async def test_a_claim_whose_answer_is_lost_is_given_back_and_counts_as_no_crash(cut_off: Outbox, link: Link) -> None:
    await emit(cut_off, *range(3))
    await cut_off.store.route(10, {})
    for _ in range(3):
        link.trip_at(["UPDATE"])
        with pytest.raises(Exception):  # noqa: B017 - whatever the driver says of a cut connection
            async with cut_off.store.claim(10, lease=HOUR, destination="q"):
                pass
        assert link.tripped.is_set()
        await given_back(cut_off)
    async with cut_off.store.claim(10, lease=HOUR, destination="q") as claim:
        assert [attempt.crash_count for attempt in claim.attempts] == [0, 0, 0]


@pytest.mark.parametrize("known", [True, False], ids=["in one statement", "in a transaction"])
async def test_a_hand_over_whose_answer_is_lost_is_given_back_and_counts_as_no_crash(
    cut_off: Outbox, link: Link, known: bool
) -> None:
    wanted = {"q": Wanted(10, HOUR)}
    if known:  # the router has seen this routing key before
        await emit(cut_off, "before")
        await cut_off.store.route(10, {})
    await emit(cut_off, *range(3))
    link.trip_at(["UPDATE"] if known else ["COMMIT"])
    with pytest.raises(Exception):  # noqa: B017 - whatever the driver says of a cut connection
        await cut_off.store.route(10, {}, wanted)
    assert link.tripped.is_set()
    await given_back(cut_off)
    async with cut_off.store.claim(10, lease=HOUR, destination="q") as claim:
        assert [attempt.crash_count for attempt in claim.attempts] == [0] * (3 + known)
