"""Copies: what the next copy of a message says of the attempts before it."""

from __future__ import annotations

from datetime import UTC, datetime

from outbox.core.attempt import Attempt, Dead
from outbox.core.dead_letter import clean
from outbox.core.history import LONGEST_HISTORY, history_line
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.headers import (
    ATTEMPT,
    CRASHES,
    DIED_AT,
    DUE_AT,
    ERROR,
    EXPIRES_AT,
    HISTORY,
    MOST_COUNTED,
    QUEUE,
    REASON,
    microseconds,
)


def after_failure(attempt: Attempt, envelope: Envelope, failure: str) -> dict[str, object]:
    """The headers of the next attempt."""
    line = history_line(f"attempt {attempt.attempt_count} failed", clean(failure))
    return {ATTEMPT: min(attempt.attempt_count + 1, MOST_COUNTED), HISTORY: _ending(envelope.history + line)}


def of_dead_letter(attempt: Attempt, envelope: Envelope, queue: str, outcome: Dead) -> dict[str, object]:
    """The headers of a dead letter."""
    failure = clean(outcome.error)
    line = history_line(f"attempt {attempt.attempt_count} was the last, {outcome.reason}", failure)
    return {
        ATTEMPT: attempt.attempt_count,
        CRASHES: min(attempt.crash_count, MOST_COUNTED),
        HISTORY: _ending(envelope.history + line),
        QUEUE: queue,
        REASON: str(outcome.reason),
        ERROR: failure,
        DIED_AT: microseconds(datetime.now(UTC)),
    }


def of_replay(envelope: Envelope) -> dict[str, object]:
    """The headers of a dead letter's new beginning."""
    history = _ending(envelope.history + history_line("replayed", "attempts start again"))
    return {
        ATTEMPT: None,
        CRASHES: None,
        EXPIRES_AT: None,
        DUE_AT: microseconds(datetime.now(UTC)),
        HISTORY: history,
    }


def _ending(history: str) -> str:
    """As many bytes of its end as a frame has room for beside other headers."""
    return history.encode(errors="replace")[-LONGEST_HISTORY:].decode(errors="ignore")
