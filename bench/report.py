"""Report: what was measured, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """What was wanted and what was measured."""

    what: str
    wanted: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Report:
    """One part's table, and what it says about the targets."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    targets: Sequence[Target] = field(default=())
    where: str = ""  # and when

    def markdown(self) -> str:
        parts = (f"## {self.title}", self.about, table(self.columns, self.rows), self.where)
        return "\n\n".join(part for part in parts if part) + "\n"


def summary(reports: Sequence[Report]) -> str:
    rows = [
        (target.what, target.wanted, target.measured, "yes" if target.met else "**no**")
        for report in reports
        for target in report.targets
    ]
    return f"## Summary\n\n{table(('what', 'wanted', 'measured', 'met'), rows)}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def at_least(what: str, wanted: float, ratios: Sequence[float]) -> Target:
    measured = statistics.median(ratios)
    return Target(what, f"≥ {number(wanted)}", number(measured), measured >= wanted)


def at_most(what: str, wanted: float, values: Sequence[float], unit: str = "", *, aim: bool = False) -> Target:
    """An aim is what would be better still."""
    measured = statistics.median(values)
    least = f"{'aim: ' if aim else ''}≤ {number(wanted)}{unit}"
    return Target(what, least, f"{number(measured)}{unit}", measured <= wanted)


def number(value: float) -> str:
    """Three digits are more than the noise lets through."""
    if value >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def median(values: Sequence[float]) -> str:
    return number(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the most of all rounds."""
    return f"{median(values)} ({number(min(values))} to {number(max(values))})"
