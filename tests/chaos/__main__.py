"""`python -m tests.chaos`: minutes of faults, and a table of what came of it. Ends with 1 if a promise was broken."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time

from tests.chaos.profiles import FAIL_OVERS, LONG
from tests.chaos.run import run

KNOWN = {**LONG, **FAIL_OVERS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="the same faults as an earlier run (default: new ones)")
    parser.add_argument("--minutes", type=float, help="of each run (default: 3 on SQLite, 10 elsewhere)")
    parser.add_argument("--database", choices=KNOWN, help=f"this one alone (default: {', '.join(LONG)})")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # processes, servers and mounts are put away first
    seed = random.randrange(100_000) if arguments.seed is None else arguments.seed
    names = [arguments.database] if arguments.database else list(LONG)
    survived = [survives(name, seed, arguments.minutes) for name in names]
    return 0 if all(survived) else 1


def survives(name: str, seed: int, minutes: float | None) -> bool:
    """Run one database's profile and print what came of it."""
    profile = KNOWN[name] if minutes is None else KNOWN[name].lasting(minutes)
    began = time.monotonic()
    report = run(profile, seed, lambda line: print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True))
    print("", *report.lines(), "", sep="\n", flush=True)
    if report.violations:
        again = f"--seed {seed} --database {name}" + (f" --minutes {minutes:g}" if minutes is not None else "")
        print(f"Histories and logs are in {report.folder}")
        print(f'The same faults again: make chaos ARGS="{again}"\n', flush=True)
    return not report.violations


if __name__ == "__main__":
    sys.exit(main())
