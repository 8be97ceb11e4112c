"""Output: what a page shows against what was printed. Ids, times and durations differ from run to run."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANYTHING = "…"  # alone on a line: any lines; within a line: any text

IDS = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")

_MASKS = {
    "ID": IDS,
    "TIME": re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:\d\d)?"),
    "DURATION": re.compile(r"\b\d+(\.\d+)?(ms|[smhd])(\d+[smh])?(?![\w.])"),
}


def shape(line: str) -> str:
    """A line without what differs from run to run, and without its columns' widths."""
    for mask, pattern in _MASKS.items():
        line = pattern.sub(mask, line)
    return " ".join(line.split())


def matches(shown: str, printed: str) -> bool:
    """Whether a printed line has the shape of the line that the page shows."""
    pattern = ".*".join(re.escape(part) for part in shape(shown).split(ANYTHING))
    return re.fullmatch(pattern, shape(printed)) is not None


def difference(shown: Sequence[str], printed: Sequence[str], *, in_order: bool = True) -> str | None:
    """What is not as the page shows it; none if all is."""
    agree = _agree if in_order else _agree_in_any_order
    if agree(list(shown), list(printed)):
        return None
    return "\n".join(["the page shows:", *shown, "", "but this was printed:", *printed])


def _agree(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0].strip() == ANYTHING:
        return any(_agree(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and matches(shown[0], printed[0]) and _agree(shown[1:], printed[1:])


def _agree_in_any_order(shown: list[str], printed: list[str]) -> bool:
    left = list(printed)
    for line in shown:
        if line.strip() != ANYTHING:
            found = next((each for each in left if matches(line, each)), None)
            if found is None:
                return False
            left.remove(found)
    return not left or any(line.strip() == ANYTHING for line in shown)
