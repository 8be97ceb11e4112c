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

from outbox import Message, Reject, TransactionError, listen
from tests.chaos import mistakes
from tests.chaos.checker import digest
from tests.chaos.fates import FATES, HANGS_ON, MOST_ATTEMPTS, MOST_CRASHES, Fate
from tests.chaos.history import Emitted, original_id
from tests.chaos.surroundings import Surroundings, historian
from tests.chaos.tables import effects

RETRY = 0.3  # seconds
UNLUCKY = 1_000_000  # crashes that are not a message's own fault bury no message here
TIMEOUT = 1.0  # seconds for a listener that hangs, at most


class PlannedFailure(Exception):
    """The message was meant to fail this attempt."""


Order = dict[str, Any]


def again(attempt_count: int, error: BaseException) -> float | None:
    """What a fault does to a listener is retried without end; what was planned has its number of attempts."""
    was_planned = isinstance(error, PlannedFailure | TransactionError) or mistakes.was_made(attempt_count)
    return None if was_planned and attempt_count >= MOST_ATTEMPTS else RETRY


def limit(message: Message) -> float:
    """Shorter where a listener that takes its time keeps everything else waiting, as on SQLite."""
    return min(TIMEOUT, 3 * Surroundings.here().slow)


@listen("order.*", queue="invoices", retry_delays=again, max_crashes=UNLUCKY)
async def invoices(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    fate = begin(order, message, queue_name, attempt_count)
    if fate.name == "kills once":
        kill_once(message)
    await session.execute(effect(message, queue_name, attempt_count))
    if fate.name == "slow":
        await asyncio.sleep(Surroundings.here().slow)
    await mistakes.make(fate, session, message, attempt_count)
    end(fate, message, queue_name, attempt_count)


@listen("order.shared", queue="ledger", retry_delays=again, max_crashes=UNLUCKY, concurrency=4)
def ledger(order: Order, message: Message, queue_name: str, attempt_count: int, session: Session) -> None:
    """A plain function, in a thread."""
    fate = begin(order, message, queue_name, attempt_count)
    session.execute(effect(message, queue_name, attempt_count))
    if fate.name == "slow":
        time.sleep(Surroundings.here().slow)
    mistakes.make_plainly(fate, session, message, attempt_count)
    end(fate, message, queue_name, attempt_count)


@listen("poison.*", queue="poison", retry_delays=again, max_crashes=MOST_CRASHES)
async def poison(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    begin(order, message, queue_name, attempt_count)
    os.kill(os.getpid(), signal.SIGKILL)


@listen("hang.*", queue="hangs", retry_delays=again, max_crashes=UNLUCKY, timeout=limit)
async def hangs(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    fate = begin(order, message, queue_name, attempt_count)
    await session.execute(effect(message, queue_name, attempt_count))
    if mistakes.is_due(fate, message, attempt_count):
        await mistakes.hang(heeds=fate.mistake != HANGS_ON)


@listen("thread.*", queue="plain-hangs", retry_delays=again, max_crashes=UNLUCKY, timeout=limit)
def plain_hangs(order: Order, message: Message, queue_name: str, attempt_count: int, session: Session) -> None:
    fate = begin(order, message, queue_name, attempt_count)
    session.execute(effect(message, queue_name, attempt_count))
    if mistakes.is_due(fate, message, attempt_count):
        mistakes.hang_plainly(message, attempt_count)


@listen("driver.*", queue="drivers", retry_delays=again, max_crashes=UNLUCKY)
async def drivers(order: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    """Commits through the driver, which nothing can refuse; then it fails, or returns as if nothing had happened."""
    fate = begin(order, message, queue_name, attempt_count)
    reject_if_committed(message, queue_name)
    await session.execute(effect(message, queue_name, attempt_count))
    connection = await (await session.connection()).get_raw_connection()
    driver: Any = connection.driver_connection
    execute = driver.execute if hasattr(driver, "execute") else driver.query
    await execute("COMMIT")
    end_committed(fate, message, queue_name, attempt_count)


@listen("driver.*", queue="plain-drivers", retry_delays=again, max_crashes=UNLUCKY)
def plain_drivers(order: Order, message: Message, queue_name: str, attempt_count: int, session: Session) -> None:
    fate = begin(order, message, queue_name, attempt_count)
    reject_if_committed(message, queue_name)
    session.execute(effect(message, queue_name, attempt_count))
    driver: Any = session.connection().connection.driver_connection
    execute = driver.execute if hasattr(driver, "execute") else driver.query
    execute("COMMIT")
    end_committed(fate, message, queue_name, attempt_count)


@listen("spare.*", queue="spare")
async def spare(order: Order) -> None:
    """Gets no message: whoever deletes its queue loses nothing."""


everywhere = [poison, hangs, plain_hangs, drivers, plain_drivers, spare]
listeners = [invoices, ledger, *everywhere]


def begin(order: Order, message: Message, queue: str, attempt: int) -> Fate:
    mistakes.none_so_far()
    historian().note("began", message=original_id(message), queue=queue, attempt=attempt)
    return FATES[order["fate"]]


def end(fate: Fate, message: Message, queue: str, attempt: int) -> None:
    """Return, or fail after the effect was written: it must not be kept."""
    if fate.mistake or attempt > fate.failures:
        return
    historian().note("failed", message=original_id(message), queue=queue, attempt=attempt)
    if fate.reason == "rejected":
        raise Reject("nobody wants this order")
    raise PlannedFailure(f"attempt {attempt} {fate.name}")


def reject_if_committed(message: Message, queue: str) -> None:
    """A worker that dies right after the commit leaves a message that comes again: nothing can know better."""
    mark = Surroundings.here().folder / "killed" / f"{message.id} {queue}"
    if mark.exists():
        raise Reject("its effect was committed before its worker died")
    mark.touch()


def end_committed(fate: Fate, message: Message, queue: str, attempt: int) -> None:
    historian().note("own commit", message=original_id(message), queue=queue)
    if int(message.id[-1], 16) % 2:
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
