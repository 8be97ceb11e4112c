"""`python -m tests.matrix`: runs the tests on each version that people run, and writes what came of it to a page."""

from __future__ import annotations

import argparse
import signal
import sys

from tests.matrix.namespaces import CannotEnter
from tests.matrix.results import PAGE, Result, record, recorded, table
from tests.matrix.running import run
from tests.matrix.versions import VERSIONS, Version, choose

_INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="version", help="such as rabbitmq-4.3; all if none is named")
    parser.add_argument("--list", action="store_true", help="list the versions and end")
    parser.add_argument(
        "--tests", nargs="+", metavar="path", help="these tests instead of all that belong to a version"
    )
    parser.add_argument("--workers", type=int, default=2, help="tests side by side, 2 if this is not given")
    arguments = parser.parse_args()
    if arguments.list:
        say("\n".join(f"{version.name:22}{version.says}" for version in VERSIONS))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # both end it in the same way, and what was started ends too
        signal.signal(number, signal.default_int_handler)
    done: list[Result] = []
    try:
        for version in choose(arguments.names):
            say(f"\n=== {version.says} ===")
            result = attempt(version, arguments.tests, arguments.workers)
            if result is not None:
                done.append(result)
                record(result)
    except KeyboardInterrupt:
        say("\ninterrupted: what had ended before is recorded")
        return _INTERRUPTED
    if done:
        say("\n" + "\n".join(table(recorded())))
        say(f"\nwritten to {PAGE.name}")
    return 1 if any(result.failed for result in done) or len(done) < len(choose(arguments.names)) else 0


def attempt(version: Version, tests: list[str] | None, workers: int) -> Result | None:
    """Run a version; say why if that cannot be done here."""
    try:
        result = run(version, tests or version.tests, workers)
    except CannotEnter as error:
        say(f"--- {version.name}: not run: {error}")
        return None
    say(f"--- {version.name}: {result.passed} passed, {result.failed} failed, {result.skipped} skipped")
    return result


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
