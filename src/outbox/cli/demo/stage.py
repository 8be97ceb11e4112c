"""The stage: what the audience sees. Bars on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from outbox.cli import screen, words
from outbox.cli.demo.ledger import Entry


class Stage:
    """Tells the story, with the second at which each thing happened."""

    def __init__(self, output: IO[str] | None = None) -> None:
        self._console = screen.console(output)
        self._began = time.monotonic()
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("       {task.description:<10}"), BarColumn(40), MofNCompleteColumn())
            self._progress = self._stack.enter_context(Progress(*columns, console=self._console, transient=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress = None
        self._stack.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One sentence of the story."""
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(Text(f"{self.seconds:4.1f}s", style="dim"), Text(words.printable(text)))
        screen.show(line, on=self._console)

    def expect(self, totals: Mapping[str, int]) -> None:
        """Draw a bar for each of these."""
        if self._progress is not None:
            self._bars = {what: self._progress.add_task(what, total=total) for what, total in totals.items()}

    def update(self, counts: Mapping[str, int]) -> None:
        if self._progress is not None:
            for what, count in counts.items():
                self._progress.update(self._bars[what], completed=count)

    def show_ledger(self, title: str, entries: Sequence[Entry]) -> None:
        """Expected and counted, side by side."""
        rows = [
            (
                entry.what,
                f"at least {entry.expected}" if entry.at_least else entry.expected,
                entry.counted,
                "ok" if entry.balances else "WRONG",
            )
            for entry in entries
        ]
        table = screen.table((title, "expected", "counted", ""), rows, numbers=("expected", "counted"))
        screen.show("", table, "", on=self._console)

    def show(self, *texts: str) -> None:
        screen.show(*(Text(text) for text in texts), on=self._console)
