"""Waiting: what is done when a transaction has committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Connection

from outbox.core.errors import TransactionError

Action = Callable[[], None]
Aborted = Callable[[Connection], TransactionError | None]  # why the database would keep nothing of a transaction


class Hook(Protocol):
    """What a caller wants done after the commit. It does not raise."""

    def run(self) -> None: ...

    async def run_and_await(self) -> None: ...


@dataclass(slots=True)
class Waiting:
    """What waits for the end of one transaction or savepoint."""

    actions: list[Action] = field(default_factory=list)
    hooks: list[Hook] = field(default_factory=list)

    def take(self, other: Waiting) -> None:
        self.actions += other.actions
        self.hooks += other.hooks

    def run(self) -> None:
        """The transaction has committed."""
        for action in self.actions:
            action()
        for hook in self.hooks:
            hook.run()
