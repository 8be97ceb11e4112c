"""Roads: "The roads" of the architecture page, as tests read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/architecture.md"

Step = tuple[str, str]  # a file and the qualified name of a function in it

_STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)` `([\w.]+)`: (settlement: )?")
_FILES = re.compile(r"^Files: (.*?)\.$", re.MULTILINE | re.DOTALL)
_AT_TIMES = re.compile(r"^At times: (.*?)\.$", re.MULTILINE | re.DOTALL)
_OWNER = re.compile(r"^\| ([^|]+?) \| `(\w+)` in `([\w/]+\.py)` \|", re.MULTILINE)
_ROW = re.compile(r"^\| ([^|]+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Road:
    """One road, as the page tells it."""

    name: str
    numbers: tuple[int, ...]
    sides: tuple[tuple[Step, ...], ...]  # each in its order; what happens on two sides happens side by side
    files: frozenset[str]
    settlement: Step  # with which it begins, on the last side
    at_times: frozenset[str]  # files that a message passes if something else falls due while it is on its way

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for side in self.sides for step in side)


@dataclass(frozen=True)
class Count:
    """A row of the table: files and calls per message."""

    files_before: int
    calls_before: int
    files: int
    calls: int


def roads() -> dict[str, Road]:
    section = PAGE.read_text().partition("\n## The roads\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.+)$", section, flags=re.MULTILINE)[1:]
    told = {
        name: text for name, text in zip(parts[::2], parts[1::2], strict=True) if _STEP.search(text) or "1. " in text
    }
    return {name: _road(name, text) for name, text in told.items()}


def counts() -> dict[str, Count]:
    section = PAGE.read_text().partition("\n### Files and calls per message\n")[2].partition("\n#")[0]
    return {row[0]: Count(*map(int, row[1:])) for row in _ROW.findall(section)}


def owners() -> list[tuple[str, str, str]]:
    """On which roads, which class, and in which file: who must settle a message in flight or give it back."""
    section = PAGE.read_text().partition("\n## Who owns a message in flight\n")[2].partition("\n## ")[0]
    return _OWNER.findall(section)


def _road(name: str, text: str) -> Road:
    sides: list[list[Step]] = []
    numbers: list[int] = []
    settlement: list[Step] = []
    for paragraph in text.split("\n\n"):
        steps = [found for line in paragraph.splitlines() if (found := _STEP.match(line))]
        if steps:
            numbers += [int(step[1]) for step in steps]
            sides.append([(step[2], step[3]) for step in steps])
            settlement = [(step[2], step[3]) for step in steps if step[4]]
    files, at_times = _named(_FILES, text), _named(_AT_TIMES, text)
    return Road(name, tuple(numbers), tuple(map(tuple, sides)), files, settlement[0], at_times)


def _named(pattern: re.Pattern[str], text: str) -> frozenset[str]:
    found = pattern.search(text)
    return frozenset(re.findall(r"`([\w/]+\.py)`", found[1])) if found else frozenset()
