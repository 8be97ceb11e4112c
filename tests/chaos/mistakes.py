"""Mistakes: what a listener does to its session, or to its process, that no listener should.

Each is made after the listener has written its effect. Whatever becomes of it, the message must not count as handled
without that effect.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar

from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from outbox import Message, get_tracking_ids
from outbox.core.loops import ABANDONED
from tests.chaos import deadlocks
from tests.chaos.children import fork
from tests.chaos.fates import (
    CLOSES,
    CLOSES_CONNECTION,
    COMMITS,
    COMMITS_CONNECTION,
    FORKS,
    LEAVES,
    ROLLS_BACK,
    SENDS_COMMIT,
    SENDS_ROLLBACK,
    SWALLOWS,
    Fate,
)
from tests.chaos.history import original_id
from tests.chaos.surroundings import historian
from tests.chaos.tables import effects

# No effect without a message. SQLite would undo the statement alone, so it is told to undo the transaction; MySQL
# cannot be told, and undoes everything only after a deadlock.
IMPOSSIBLE = (
    insert(effects).prefix_with("OR ROLLBACK", dialect="sqlite").values(message_id=None, queue="", attempt=0, digest="")
)

LONGEST_HANG = 30.0  # seconds for a thread that waits in vain to be given up
HANGS_FOR = 1.2  # seconds that it hangs at least: longer than the time that it has

_given_up: dict[tuple[str, int], threading.Event] = defaultdict(threading.Event)  # by message id and attempt


_careless: ContextVar[str] = ContextVar("careless", default="")  # the message with which a list was careless last


def was_made(attempt: int) -> bool:
    """Whether the listener of the message at hand made its mistake in this attempt, which is given up now.

    A thread's own context is not seen here, and a list of messages has no tracking ids.
    """
    for message_id in (*get_tracking_ids()[-1:], _careless.get()):
        if (message_id, attempt) in _given_up:
            _given_up[message_id, attempt].set()
            return True
    return False


def none_so_far() -> None:
    """Another message's turn."""
    _careless.set("")


async def make(fate: Fate, session: AsyncSession, message: Message, attempt: int) -> None:
    """What the fate says, in this attempt."""
    if is_due(fate, message, attempt):
        with suppress(*([Exception] if fate.goes_on else [])):
            await _WAYS[fate.mistake](session)


def make_plainly(fate: Fate, session: Session, message: Message, attempt: int) -> None:
    """The same with a plain session."""
    if is_due(fate, message, attempt):
        with suppress(*([Exception] if fate.goes_on else [])):
            _PLAIN_WAYS[fate.mistake](session)


def is_due(fate: Fate, message: Message, attempt: int) -> bool:
    """Whether it is made in this attempt; if so it is remembered."""
    if attempt > fate.mistakes:
        return False
    historian().note("mistake", message=original_id(message), attempt=attempt, fate=fate.name)
    _given_up[message.id, attempt].clear()
    _careless.set(message.id)
    return True


async def hang(heeds: bool) -> None:
    """For ever, or until its time is over and it goes on all the same."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as cancelled:
        if heeds or ABANDONED in cancelled.args:
            raise


def hang_plainly(message: Message, attempt: int) -> None:
    """Until its time is over: then the thread goes on, because nothing can stop it."""
    began = time.monotonic()
    _given_up[message.id, attempt].wait(LONGEST_HANG)
    time.sleep(max(0.0, began + HANGS_FOR - time.monotonic()))  # it may be a copy of it that was given up


async def swallow(session: AsyncSession) -> None:
    if session.get_bind().dialect.name == "mysql":
        await deadlocks.run_into(session)
        return
    with suppress(DBAPIError):
        await session.execute(IMPOSSIBLE)


async def _leave(session: AsyncSession) -> None:
    async with session:
        pass


async def _commit_connection(session: AsyncSession) -> None:
    await (await session.connection()).commit()


async def _close_connection(session: AsyncSession) -> None:
    await (await session.connection()).close()


async def _send_commit(session: AsyncSession) -> None:
    await session.execute(text("COMMIT"))


async def _send_rollback(session: AsyncSession) -> None:
    await session.execute(text("ROLLBACK"))


async def _fork(_: AsyncSession) -> None:
    fork(outbox.outbox)


_WAYS: Mapping[str, Callable[[AsyncSession], Awaitable[None]]] = {
    SWALLOWS: swallow,
    CLOSES: lambda session: session.close(),
    LEAVES: _leave,
    COMMITS: lambda session: session.commit(),
    ROLLS_BACK: lambda session: session.rollback(),
    COMMITS_CONNECTION: _commit_connection,
    CLOSES_CONNECTION: _close_connection,
    SENDS_COMMIT: _send_commit,
    SENDS_ROLLBACK: _send_rollback,
    FORKS: _fork,
}


def _swallow_plainly(session: Session) -> None:
    if session.get_bind().dialect.name == "mysql":
        deadlocks.run_into_plainly(session)
        return
    with suppress(DBAPIError):
        session.execute(IMPOSSIBLE)


def _leave_plainly(session: Session) -> None:
    with session:
        pass


_PLAIN_WAYS: Mapping[str, Callable[[Session], object]] = {
    SWALLOWS: _swallow_plainly,
    CLOSES: lambda session: session.close(),
    LEAVES: _leave_plainly,
    COMMITS: lambda session: session.commit(),
    ROLLS_BACK: lambda session: session.rollback(),
    COMMITS_CONNECTION: lambda session: session.connection().commit(),
    CLOSES_CONNECTION: lambda session: session.connection().close(),
    SENDS_COMMIT: lambda session: session.execute(text("COMMIT")),
    SENDS_ROLLBACK: lambda session: session.execute(text("ROLLBACK")),
    FORKS: lambda _: fork(outbox.outbox),
}
