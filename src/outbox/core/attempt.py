"""Attempt: one try at a message, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import ClassVar

from outbox.core.durations import NO_DELAY
from outbox.core.message import Message


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try. `id` names it within its claim or queue; a replayed message has a new one."""

    message: Message
    attempt_count: int = 1  # this try's number, starting from 1; tries that ended in a crash are not counted
    id: int = 0
    crash_count: int = 0  # earlier tries that never ended: their process died or lost its lease
    isolated: bool = False  # one more crash makes it a dead letter, so nothing else runs beside it


class Reason(StrEnum):
    """Why a message is no longer tried."""

    EXHAUSTED = "exhausted"  # the retry delays are used up
    REJECTED = "rejected"  # the listener raised Reject
    REFUSED = "refused"  # the destination says it never will
    EXPIRED = "expired"  # its expiration passed
    UNDECODABLE = "undecodable"  # the body is not what the listener's annotation says
    CRASHED = "crashed"  # it took its worker down `max_crashes` times
    UNWANTED = "unwanted"  # it was received for a queue that no listener has


@dataclass(frozen=True, slots=True)
class Done:
    """It succeeded. `in_transaction`: the listener's own transaction has already written so."""

    in_transaction: bool = False


@dataclass(frozen=True, slots=True)
class RetryIn:
    """It failed and is due again after the delay. `in_transaction`: the one of `on_error` has already written so."""

    delay: timedelta
    error: str
    in_transaction: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter: no further attempt. `in_transaction`: that of `on_error` has written it already."""

    reason: Reason
    error: str = ""
    in_transaction: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """It was given back untried: no attempt, no start. A relay may ask for a delay before it is due again."""

    delay: timedelta = NO_DELAY
    in_transaction: ClassVar[bool] = False


Outcome = Done | RetryIn | Dead | Released
