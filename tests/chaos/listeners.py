"""Listeners: each writes an effect through its session, and then behaves as its message's fate says."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from sqlalchemy import Insert, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Reject, listen
from tests.chaos.checker import digest
from tests.chaos.fates import FATES, MOST_ATTEMPTS, MOST_CRASHES, Fate
from tests.chaos.history import Emitted, original_id
from tests.chaos.surroundings import Surroundings, historian
from tests.chaos.tables import effects

RETRY = 0.3  # seconds
UNLUCKY = 1_000_000  # crashes that are not a message's own fault bury no message here


class PlannedFailure(Exception):
    """The message was meant to fail this attempt."""


Order = dict[str, Any]


def again(attempt_count: int, error: BaseException) -> float | None:
    """What a fault does to a listener is retried without end; what was planned has its number of attempts."""
    return None if isinstance(error, PlannedFailure) and attempt_count >= MOST_ATTEMPTS else RETRY


@listen("order.*", queue="invoices", retry_delays=again, max_crashes=UNLUCKY)
async def invoices(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    fate = begin(order, message, queue_name, attempt_count)
    if fate.name == "kills once":
        kill_once(message)
    await session.execute(effect(message, queue_name, attempt_count))
    if fate.name == "slow":
        await asyncio.sleep(Surroundings.here().slow)
    end(fate, message, queue_name, attempt_count)


@listen("order.shared", queue="ledger", retry_delays=again, max_crashes=UNLUCKY, concurrency=4)
def ledger(order: Order, message: Message, queue_name: str, attempt_count: int, session: Session) -> None:
    """A plain function, in a thread."""
    fate = begin(order, message, queue_name, attempt_count)
    session.execute(effect(message, queue_name, attempt_count))
    if fate.name == "slow":
        time.sleep(Surroundings.here().slow)
    end(fate, message, queue_name, attempt_count)


@listen("poison.*", queue="poison", retry_delays=again, max_crashes=MOST_CRASHES)
async def poison(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    begin(order, message, queue_name, attempt_count)
    os.kill(os.getpid(), signal.SIGKILL)


@listen("spare.*", queue="spare")
async def spare(order: Order) -> None:
    """Gets no message: whoever deletes its queue loses nothing."""


listeners = [invoices, ledger, poison, spare]


def begin(order: Order, message: Message, queue: str, attempt: int) -> Fate:
    historian().note("began", message=original_id(message), queue=queue, attempt=attempt)
    return FATES[order["fate"]]


def end(fate: Fate, message: Message, queue: str, attempt: int) -> None:
    """Return, or fail after the effect was written: it must not be kept."""
    if attempt > fate.failures:
        return
    historian().note("failed", message=original_id(message), queue=queue, attempt=attempt)
    if fate.reason == "rejected":
        raise Reject("nobody wants this order")
    raise PlannedFailure(f"attempt {attempt} {fate.name}")


def effect(message: Message, queue: str, attempt: int) -> Insert:
    seen = Emitted.of(message)
    return insert(effects).values(message_id=seen.id, queue=queue, attempt=attempt, digest=digest(seen))


def kill_once(message: Message) -> None:
    """Take this process down, the first time that the message is handled."""
    mark = Surroundings.here().folder / "killed" / message.id
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
