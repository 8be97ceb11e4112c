"""History: a line of text for each attempt that ended, kept with the message."""

from __future__ import annotations

from datetime import UTC, datetime

LONGEST_HISTORY = 16 * 1024  # characters in a table, bytes in a header; the oldest lines go first


def history_line(what: str, error: str) -> str:
    """When, what, why. The clock is this process's, for people only."""
    first_line = next(iter(error.splitlines()), "")
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {what}: {first_line[:1000]}\n"
