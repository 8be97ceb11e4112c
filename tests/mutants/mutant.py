"""Mutant: a patch, the promise it breaks, and the test that must fail."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).parent

_PATCH = re.compile(r"Promise: (?P<promise>.+)\nKilled by: (?P<test>.+)\n\n(?P<diff>(?:diff|---) (?s:.+))")
_FILE = re.compile(r"^--- a/(.+)\n\+\+\+ b/\1\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ .*\n", re.MULTILINE)


class DoesNotApply(Exception):
    """The sources have moved on: make the patch anew."""


@dataclass(frozen=True)
class Change:
    """Lines of one file, and the lines that take their place."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """One way to break the library."""

    name: str
    promise: str
    test: str  # as pytest names it
    changes: tuple[Change, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        found = _PATCH.fullmatch(path.read_text())
        if found is None:
            raise ValueError(f"{path.name} does not open with its promise and its test: see the other patches")
        return cls(path.stem, found["promise"], found["test"], tuple(_changes(found["diff"])))

    def apply(self, root: Path) -> None:
        """Break the sources below a folder. The lines count, not their numbers: these change with every commit."""
        for change in self.changes:
            path = root / change.path
            text = path.read_text()
            if text.count(change.before) != 1:
                raise DoesNotApply(f"{self.name}: {change.path} has its lines {text.count(change.before)} times")
            path.write_text(text.replace(change.before, change.after))


def mutants() -> list[Mutant]:
    """All of them, by name."""
    return [Mutant.read(path) for path in sorted(PATCHES.glob("*.patch"))]


def _changes(diff: str) -> list[Change]:
    _, *files = _FILE.split(diff)
    return [
        Change(path, _side(hunk, "-"), _side(hunk, "+"))
        for path, hunks in zip(files[::2], files[1::2], strict=True)
        for hunk in _HUNK.split(hunks)[1:]
    ]


def _side(hunk: str, sign: str) -> str:
    """What a hunk says of the file before (-) or after (+) the change. Editors leave nothing of an empty line."""
    return "".join(line[1:] or line for line in hunk.splitlines(keepends=True) if line[0] in (" ", "\n", sign))
