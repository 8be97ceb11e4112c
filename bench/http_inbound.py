"""Receiving: what it costs to store events that come over HTTP, beside one transaction for each by hand."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.contenders import PREPARED
from bench.database import Database
from bench.processes import program
from bench.programs.posting import CONCURRENCY
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

WARM_UP, MESSAGES = 300, 4_000
BY_HAND, OURS = "by hand", "outbox"


@dataclass(frozen=True)
class Taken:
    """What one turn of a server came to."""

    rate: float  # requests a second
    processor_time: float  # of the server, in µs for each


async def measure(database: Database, settings: Settings) -> Report:
    async with database.connection() as connection:
        await connection.execute(
            "CREATE TABLE received_by_hand (source text, id text, type text, body text, PRIMARY KEY (source, id))"
        )
    found = await in_turns([BY_HAND, OURS], settings.rounds, lambda name: _taken(name, database))
    rates = {name: [one.rate for one in ones] for name, ones in found.items()}
    to_by_hand = {name: ratios(rates[name], rates[BY_HAND]) for name in found}
    return Report(
        "Receiving over HTTP",
        f"{number(MESSAGES)} signed CloudEvents, {CONCURRENCY} requests under way at a time, to one uvicorn process, "
        "from a process of its own. By hand a request is verified, parsed, written with ON CONFLICT DO NOTHING in a "
        "transaction of its own, and answered. `http_app` writes an inbox entry and a message; what comes while one "
        "transaction is written shares the next. Neither handles what it stored.",
        ("", "requests/s", "to by hand", "processor time of the server, µs per request"),
        [
            (name, spread(rates[name]), spread(to_by_hand[name]), spread([one.processor_time for one in ones]))
            for name, ones in found.items()
        ],
        [at_least("receiving over HTTP: rate, to one transaction for each by hand", 0.6, to_by_hand[OURS])],
    )


async def _taken(name: str, database: Database) -> Taken:
    which = "ours" if name == OURS else "by-hand"
    environment = {"OUTBOX_DB_ENGINE_URL": database.url_for("asyncpg") + PREPARED}
    async with (
        program((sys.executable, "-m", "bench.programs.receiving", which), environment) as server,
        program((sys.executable, "-m", "bench.programs.posting"), {}) as sender,
    ):
        port = await server.heard()
        await sender.asked(f"{port} 0 {WARM_UP}")
        before = server.processor_time
        seconds = float(await sender.asked(f"{port} {WARM_UP} {MESSAGES}"))
        return Taken(MESSAGES / seconds, (server.processor_time - before) / MESSAGES * 1e6)
