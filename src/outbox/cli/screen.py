"""Screen: tables and facts on stdout. Nothing in them is read as markup, and without a terminal they are plain."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outbox.cli import words

WITHOUT_LIMIT = 10_000  # columns where no terminal sets a width: a reader of a pipe wants whole values


def console(file: IO[str] | None = None) -> Console:
    """The screen of this moment, stdout if no other is named: a test or a pipe may have changed it since the last."""
    file = file or sys.stdout
    found = Console(file=file, markup=False, highlight=False, emoji=False)
    if not found.is_terminal:
        found = Console(file=file, markup=False, highlight=False, emoji=False, width=WITHOUT_LIMIT)
    return found


def show(*parts: RenderableType, on: Console | None = None) -> None:
    """Print parts below each other, without the spaces that fill lines up."""
    screen = on or console()
    for part in parts:
        if screen.is_terminal:
            screen.print(part)
        else:
            with screen.capture() as capture:
                screen.print(part)
            text = "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))
            print(text, file=screen.file, flush=True)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> Table:
    """A table without lines. Columns of `numbers` stand to the right; those of `whole` are never broken."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column in numbers
        found.add_column(
            column.upper(), justify="right" if right else "left", no_wrap=right or column in whole, overflow="fold"
        )
    for row in rows:
        found.add_row(*(Text(words.printable(str(cell))) for cell in row))
    return found


def facts(pairs: Iterable[tuple[str, object]], indent: int = 2) -> Padding:
    """Labels with what they name, one below the other, each on a line of its own unless it is `several_lines`."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, value in pairs:
        grid.add_row(
            Text(words.printable(label)), value if isinstance(value, Text) else Text(words.printable(str(value)))
        )
    return Padding(grid, (0, 0, 0, indent), expand=False)


def several_lines(text: str) -> Text:
    """A fact that may have line breaks: an error, a body."""
    return Text(words.lines(text))


def heading(text: str) -> Text:
    return Text(words.printable(text), style="bold")


def note(text: str) -> Text:
    return Text(words.printable(text), style="dim")
