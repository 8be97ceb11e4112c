"""Hooks: what a caller wants done after the commit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox.core.callables import is_async
from outbox.core.errors import TransactionError
from outbox.core.events import HookFailed, Observer
from outbox.core.loops import cancelled_from_outside
from outbox.outbound.after_commit.session_commits import commits_of, guard, waiting_in
from outbox.outbound.after_commit.waiting import Aborted

HookedSession = AsyncSession | Session | async_scoped_session[AsyncSession] | scoped_session[Session]
Callback = Callable[[], object]


def add_hook(session: Session, callback: Callback, observe: Observer, aborted: Aborted) -> None:
    """Call a function once the session's transaction has committed; never if it, or the savepoint, rolls back."""
    if is_async(callback) and not commits_of(session).keeps_hooks:
        raise TransactionError(
            f"nobody awaits {_name(callback)} after the commit of this session: pass a plain function, or use the "
            "session of transaction() or @transactional"
        )
    guard(session, aborted)
    waiting_in(session).hooks.append(CallersHook(callback, observe))


@dataclass(frozen=True, slots=True)
class CallersHook:
    """A function of the caller's. What it raises is told: nobody could undo the commit any more."""

    callback: Callback
    observe: Observer

    def run(self) -> None:
        try:
            answer = self.callback()
            if inspect.isawaitable(answer):
                _forget(answer)
                raise TransactionError("it has to be awaited, and nobody does: use the session of transaction()")
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.observe(HookFailed(_name(self.callback), error))

    async def run_and_await(self) -> None:
        try:
            answer = self.callback()
            if inspect.isawaitable(answer):
                await answer
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            self.observe(HookFailed(_name(self.callback), error))
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.observe(HookFailed(_name(self.callback), error))


@asynccontextmanager
async def hooks_of(session: AsyncSession) -> AsyncIterator[None]:
    """Run the session's hooks at the end of this block, when nothing of its transaction is held any more."""
    commits = commits_of(session.sync_session)
    commits.keeps_hooks = True
    try:
        yield
    finally:
        commits.keeps_hooks = False
        for hook in commits.taken():
            await hook.run_and_await()


def _forget(answer: Awaitable[object]) -> None:
    if inspect.iscoroutine(answer):
        answer.close()  # otherwise Python complains that it was never awaited


def _name(callback: Callback) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
