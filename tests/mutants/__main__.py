"""`python -m tests.mutants`: breaks a copy of the sources in every way that is written down, and sees a test fail."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox.testing.servers import postgresql
from tests.mutants.mutant import Mutant, mutants

ROOT = Path(__file__).parents[2]

KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"
FAILED = 1  # pytest's exit code for tests that ran and failed
LONGEST = 120  # seconds for a test that waits for what a mutant never does

# A patch that only makes the sources unusable proves nothing.
_UNUSABLE = re.compile(r"(ImportError|ModuleNotFoundError|NameError|SyntaxError|UnboundLocalError)\b")


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared."""

    mutant: Mutant
    how: str
    said: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="patches without their ending; all if none is named")
    chosen = choose(parser.parse_args().names)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, and what was started ends too
    verdicts: list[Verdict] = []
    with postgresql() as server:
        os.environ["OUTBOX_TEST_POSTGRESQL_URL"] = server.url
        if not all_pass_unbroken(chosen):
            say("some of these tests fail on the sources as they are: mend that first")
            return 1
        for mutant in chosen:
            verdicts.append(judge(mutant))
            say(f"{verdicts[-1].how:9}{mutant.name}, {verdicts[-1].seconds:.1f} s: {verdicts[-1].said}")
    say(f"\n{table(verdicts)}\n")
    killed = sum(verdict.how == KILLED for verdict in verdicts)
    say(f"{killed} of {len(chosen)} mutants were killed")
    return 0 if killed == len(chosen) else 1


def choose(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in mutants()}
    for name in names:
        if name not in known:
            raise SystemExit(f"no mutant is called {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def all_pass_unbroken(chosen: Sequence[Mutant]) -> bool:
    tests = sorted({mutant.test for mutant in chosen})
    say(f"the {len(tests)} tests on the sources as they are …")
    with tempfile.TemporaryDirectory() as folder:
        return run(copy_of_sources(folder), tests).returncode == 0


def judge(mutant: Mutant) -> Verdict:
    """Run the mutant's test on broken sources, and say how it went."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sources = copy_of_sources(folder)
        mutant.apply(sources.parent)
        report = Path(folder) / "report.xml"
        code = run(sources, [mutant.test, f"--junitxml={report}"], quiet=True).returncode
        failed = failure(report) if code == FAILED else ""
    how = SURVIVED if code == 0 else KILLED if failed and not _UNUSABLE.match(failed) else BROKEN
    return Verdict(mutant, how, failed or f"pytest ended with {code}", time.monotonic() - began)


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        f"| {verdict.mutant.name} | {verdict.mutant.promise} | {verdict.mutant.test} | {verdict.how} | "
        f"{verdict.seconds:.1f} |"
        for verdict in verdicts
    ]
    return "\n".join(["| mutant | promise | test | verdict | seconds |", "|---|---|---|---|---:|", *lines])


def copy_of_sources(folder: str) -> Path:
    """The sources, to be broken: never those of the checkout. What is compiled already spares a second of each run."""
    return shutil.copytree(ROOT / "src", Path(folder) / "src")


def run(sources: Path, arguments: Sequence[str], *, quiet: bool = False) -> subprocess.CompletedProcess[bytes]:
    surroundings = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={LONGEST}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=quiet, check=False)


def failure(report: Path) -> str:
    """The first line of what the test said when it failed; nothing if it did not come so far."""
    found = ElementTree.parse(report).find(".//failure")  # noqa: S314 - pytest has just written it
    return "" if found is None else next(iter(found.get("message", "").splitlines()), "it failed")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
