"""After a crash: what the dead process held comes back at once and together, and no message dies of another's crash."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outbox import Message, Outbox
from tests.seeds.observing import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
LEASE = 1.0
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
