"""HTTP inbound: what it costs to store events that come over HTTP, beside one transaction for each by hand."""

from __future__ import annotations

import sys

from bench.database import Database
from bench.processes import program
from bench.programs.posting import CONCURRENCY
from bench.rabbitmq import Carried, to
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns

WARM_UP, MESSAGES = 500, 5_000
BY_HAND, WITH_CARE, OURS = "by hand", "by hand, with care", "outbox"
PROGRAMS = {BY_HAND: "by-hand", WITH_CARE: "with-care", OURS: "ours"}

TABLES = """
    CREATE TABLE received_by_hand (id bigserial PRIMARY KEY, body bytea);
    CREATE TABLE received_with_care (source text, id text, type text, body text, PRIMARY KEY (source, id));
"""


async def measure(database: Database, settings: Settings) -> Report:
    async with database.connection() as connection:
        await connection.execute(TABLES)
    found = await in_turns(list(PROGRAMS), settings.rounds, lambda name: _taken(name, database))
    return Report(
        "HTTP: inbound",
        f"{number(MESSAGES)} signed CloudEvents of 256 bytes, {CONCURRENCY} requests under way at a time, from one "
        "process to one uvicorn process. By hand a request is BEGIN, INSERT, COMMIT over asyncpg, then 204: it looks "
        "at nothing, and what comes twice is stored twice. With care its signature is verified, it is parsed, and "
        "written with ON CONFLICT DO NOTHING through a session. `http_app` does all of that and writes an inbox entry "
        "and a message; what comes while one transaction is written shares the next. No listener handles it.",
        ("", "requests/s", "to by hand", "processor time of the server, µs per request"),
        [
            (
                name,
                spread([one.rate for one in ones]),
                spread(to(ones, found[BY_HAND])),
                spread([one.processor_time for one in ones]),
            )
            for name, ones in found.items()
        ],
        [at_least("HTTP inbound: rate, to one transaction for each by hand", 0.6, to(found[OURS], found[BY_HAND]))],
    )


async def _taken(name: str, database: Database) -> Carried:
    command = (sys.executable, "-m", "bench.programs.receiving", PROGRAMS[name])
    environment = {"BENCH_URL": database.url, "OUTBOX_DB_ENGINE_URL": database.url_in_loop}
    async with (
        program(command, environment) as server,
        program((sys.executable, "-m", "bench.programs.posting"), {}) as sender,
    ):
        port = await server.heard()
        await sender.asked(f"{port} 0 {WARM_UP}")
        before = server.processor_time
        took, _ = map(float, (await sender.asked(f"{port} {WARM_UP} {MESSAGES}")).split())
        return Carried(MESSAGES / took, (server.processor_time - before) / MESSAGES * 1e6)
