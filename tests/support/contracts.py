"""Contracts: how many of their cases a store or a transport was asked, and what it declares that it cannot do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

FOLDER = "tests/contract/"


def told(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """A line for each contract, of the reports of a run by how they ended."""
    passed = Counter(_contracts(stats.get("passed", ())))
    skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in stats.get("skipped", ()):
        for contract in _contracts([report]):
            skipped[contract][_feature(report)] += 1
    for contract in sorted({*passed, *skipped}):
        count = f"contract cases: {contract} {passed[contract]} passed, {skipped[contract].total()} skipped"
        features = ", ".join(f"{feature} {times}" for feature, times in sorted(skipped[contract].items()))
        yield f"{count} ({features})" if features else count


def _contracts(reports: Iterable[Any]) -> Iterator[str]:
    for report in reports:
        if FOLDER in report.nodeid and report.nodeid.count("::") > 1:
            yield report.nodeid.split("::")[1].removeprefix("Test")


def _feature(report: Any) -> str:
    """The feature that a case was skipped for stands before the colon: `keeps_order=False: …`."""
    _, _, reason = report.longrepr
    return str(reason).removeprefix("Skipped: ").partition(":")[0]
