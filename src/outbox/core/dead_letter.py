"""DeadLetter: a message nobody will try again, with the reason, until it is replayed or discarded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from outbox.core.attempt import Reason
from outbox.core.message import Message

LARGEST_ERROR = 8 * 1024  # bytes

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """The unchanged message and why it lies here. `queue` is none where no queue had been reached."""

    id: int
    message: Message
    queue: str | None
    reason: Reason
    error: str
    attempt_count: int
    crash_count: int
    history: str  # one line for each failed attempt
    died_at: datetime


class DeadLetters(Protocol):
    """Where dead letters are kept. Listing one changes nothing about it."""

    async def list(
        self,
        *,
        queue: str | None = None,
        reason: Reason | None = None,
        error: str | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> list[DeadLetter]:
        """Dead letters in the order of their ids, those behind `after`; `error` is a part of the error's text."""
        ...

    async def show(self, id: int) -> DeadLetter:
        """One dead letter; NotFound if there is none with that id."""
        ...

    async def replay(self, ids: Sequence[int]) -> int:
        """Try these again, each where it died, with fresh attempts and without its expiration; how many there were."""
        ...

    async def discard(self, ids: Sequence[int]) -> int:
        """Delete these for good; how many there were."""
        ...


def clean(error: str) -> str:
    """An error text that every database can store: no control characters, at most 8 KiB."""
    text = _CONTROL.sub("�", error).encode(errors="replace")
    if len(text) > LARGEST_ERROR:
        text = text[: LARGEST_ERROR - len("…[cut]".encode())] + "…[cut]".encode()
    return text.decode(errors="ignore")
