"""Results: what was run, and how it ended; the record from which the page is made."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.matrix.versions import VERSIONS

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs/versions.md"

_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of the table -->)", re.DOTALL)
_PASSED, _FAILED, _SKIPPED = range(3)


@dataclass(frozen=True)
class Result:
    """One version, and what its tests said."""

    name: str  # of the version, as in versions.py
    found: tuple[str, ...]  # exact versions, the one in question first
    tests: tuple[str, ...]  # the folders and files that were run
    belongs: str  # of these, the tests of which server or database
    passed: int
    failed: int
    skipped: int
    seconds: int
    date: str
    failures: tuple[str, ...] = ()  # names of tests


def counted(report: Path) -> tuple[int, int, int, tuple[str, ...]]:
    """Passed, failed and skipped tests of a report of pytest's, and the names of those that failed."""
    ended: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
        kinds = {child.tag for child in case}
        how = _FAILED if kinds & {"failure", "error"} else _SKIPPED if "skipped" in kinds else _PASSED
        name = f"{case.get('classname')}::{case.get('name')}"
        # A test that passed and then failed to clean up stands there twice.
        ended[name] = _FAILED if _FAILED in (how, ended.get(name)) else how
    numbers = [sum(how == kind for how in ended.values()) for kind in (_PASSED, _FAILED, _SKIPPED)]
    failures = tuple(sorted(name for name, how in ended.items() if how == _FAILED))
    return numbers[0], numbers[1], numbers[2], failures


def recorded() -> list[Result]:
    """What was run so far, in the order of the versions."""
    if not RECORD.exists():
        return []
    results = {entry["name"]: _of(entry) for entry in json.loads(RECORD.read_text())}
    return [results[version.name] for version in VERSIONS if version.name in results]


def record(new: Result) -> None:
    """Keep it in place of what was run on this version before, and write the page anew."""
    results = {result.name: result for result in recorded()} | {new.name: new}
    ordered = [asdict(results[version.name]) for version in VERSIONS if version.name in results]
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), recorded()))


def page(text: str, results: Sequence[Result]) -> str:
    """The page with the table of these results."""
    lines = "\n".join([*table(results), "", *failures(results)]).rstrip()
    return _TABLE.sub(lambda _: f"\n{lines}\n\n", text)


def table(results: Sequence[Result]) -> list[str]:
    head = "| version | beside it | run | passed | failed | skipped | minutes | date |"
    known = {result.name: result for result in results}
    rows = [
        _row(known[version.name]) if version.name in known else f"| {version.says} | | not run | | | | | |"
        for version in VERSIONS
    ]
    return [head, "|---|---|---|---:|---:|---:|---:|---|", *rows]


def _row(result: Result) -> str:
    ended = f"{result.passed} | {result.failed} | {result.skipped} | {max(1, round(result.seconds / 60))}"
    return f"| {result.found[0]} | {', '.join(result.found[1:])} | {_what(result)} | {ended} | {result.date} |"


def failures(results: Iterable[Result]) -> list[str]:
    lines = []
    for result in results:
        if result.failures:
            lines += [f"What failed on {result.found[0]}:", "", *(f"- `{name}`" for name in result.failures), ""]
    return lines


def _what(result: Result) -> str:
    named = ", ".join(f"`{path}`" for path in result.tests)
    return named if result.belongs == "all" else f"{named}: tests of {result.belongs}"


def _of(entry: dict[str, object]) -> Result:
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    return replace(Result(**entry), **lists)  # type: ignore[arg-type]
