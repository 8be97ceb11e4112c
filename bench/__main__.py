"""`python -m bench`: measures, prints, and with --write puts the tables into docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import sys

from bench import claim, drain, emit, idle, latency, snapshot, wakeup
from bench.database import database
from bench.report import summary
from bench.settings import Settings

PARTS = {
    part.__name__.removeprefix("bench."): part.measure for part in (drain, emit, wakeup, claim, snapshot, latency, idle)
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of: {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has what bench/requirements.txt names")
    given = parser.parse_args()
    asyncio.run(run(given.parts or list(PARTS), Settings(given.rounds, given.peers)))


async def run(parts: list[str], settings: Settings) -> None:
    reports = []
    for part in parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        with database() as server:
            reports.append(await PARTS[part](server, settings))
        print(reports[-1].markdown(), flush=True)
    print(summary(reports))


if __name__ == "__main__":
    main()
