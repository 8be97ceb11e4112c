"""`python -m bench`: measures and prints; nothing here passes or fails."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import replace

from bench import (
    against,
    claim,
    drain,
    emit,
    http_inbound,
    http_relay,
    idle,
    inbox,
    latency,
    on_mariadb,
    page,
    paths,
    rabbitmq,
    snapshot,
    wakeup,
    wal,
)
from bench.database import database
from bench.machine import machine
from bench.report import Report, summary
from bench.settings import Settings

PARTS = {
    "drain": drain.measure,
    "emit": emit.measure,
    "wakeup": wakeup.measure,
    "claim": claim.measure,
    "snapshot": snapshot.measure,
    "latency": latency.measure,
    "idle": idle.measure,
    "inbox": inbox.measure,
    "http-relay": http_relay.measure,
    "http-inbound": http_inbound.measure,
    "rabbitmq-relay": rabbitmq.measure_relay,
    "rabbitmq-consume": rabbitmq.measure_consume,
    "rabbitmq-end-to-end": rabbitmq.measure_end_to_end,
    "rabbitmq-latency": rabbitmq.measure_latency,
    "rabbitmq-memory": rabbitmq.measure_memory,
    "wal": wal.measure,
    "mariadb-drain": on_mariadb.measure_drain,
    "mariadb-emit": on_mariadb.measure_emit,
    "mariadb-claim": on_mariadb.measure_claim,
    "mariadb-relay": on_mariadb.measure_relay,
}
ALL = {**PARTS, "paths": paths.measure, "against": against.measure}  # these are no parts of the page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"any of {', '.join(ALL)}; all but paths and against if none is named",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often everybody has a turn; 3 if not given")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with bench/requirements.txt; no peers if not given")
    parser.add_argument("--against", metavar="COMMIT", help="what the part `against` compares with")
    parser.add_argument("--smoke", action="store_true", help="the part wal with few messages: whether it runs at all")
    parser.add_argument("--write", action="store_true", help="put it into docs/benchmarks.md")
    given = parser.parse_args()
    for part in given.parts:
        if part not in ALL:
            parser.error(f"no part is called {part!r}; there are {', '.join(ALL)}")
    if given.smoke and given.write:
        parser.error("what --smoke measures is not for the page")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, and what was started ends too
    asyncio.run(
        run(
            given.parts or list(PARTS),
            Settings(given.rounds, given.peers, given.against, given.smoke),
            write=given.write,
        )
    )


async def run(parts: list[str], settings: Settings, *, write: bool) -> None:
    """Each part is printed and kept as soon as it is over, so that nothing is lost if a later one cannot be had."""
    reports: list[Report] = []
    for part in parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        with database() as server:
            where = await machine(server)
            report = replace(await ALL[part](server, settings), where=where)
        reports.append(report)
        print(report.markdown(), flush=True)
        if write and part in PARTS:
            page.keep(part, report)
            page.write(list(PARTS))
    print(summary(reports), flush=True)


if __name__ == "__main__":
    main()
