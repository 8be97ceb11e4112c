"""Strategy: an option of a listener that is a value, or a function of the message."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.callables import is_async
from outbox.core.durations import Seconds, as_lifetime, configured
from outbox.core.errors import ConfigurationError
from outbox.core.message import Message

Lane = str | Callable[[Message], str | None]
Timeout = Seconds | Callable[[Message], Seconds | None]
IsolationLevel = str | Callable[[Message], str | None]
Sessions = str | URL | Callable[[], AsyncSession | Session]  # a URL: sessions of an engine of our own
SessionFactory = Sessions | Callable[[Message], Sessions | None]
Answer = Literal["transient", "permanent"] | None
OnError = Callable[[BaseException, Message, Any, "FailedAttempt"], Answer | Awaitable[Answer]]

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """What `on_error` is told of the attempt that failed."""

    attempt_count: int  # its number, starting from 1
    retry_in: timedelta | None  # when the message would be tried again; None: this was the last attempt

    @property
    def is_last(self) -> bool:
        return self.retry_in is None


def check_lane(lane: Lane | None) -> None:
    """Refuse what is neither a name nor a function of the message."""
    if callable(lane):
        check_takes(lane, "the message", what="lane")
    elif lane is not None:
        named_lane(lane)


def named_lane(lane: object) -> str | None:
    """A lane's name, as the user's function gave it; None: no lane."""
    if lane is not None and (not isinstance(lane, str) or not lane):
        raise ConfigurationError(f"lane={lane!r}: a name, None for no lane, or a function of the message that says so")
    return lane


def fixed_limit(timeout: Timeout | None) -> timedelta | None:
    """The time limit of every message; None: there is none, or a function decides."""
    if callable(timeout):
        check_takes(timeout, "the message", what="timeout")
        return None
    return None if timeout is None else configured(as_lifetime, timeout, what="timeout")


def check_level(level: IsolationLevel | None) -> None:
    """Refuse what is neither a level of isolation nor a function of the message."""
    if callable(level):
        check_takes(level, "the message", what="isolation_level")
    elif level is not None:
        named_level(level)


def named_level(level: object) -> str:
    """A level of isolation in SQL's own words."""
    words = level.upper().replace("_", " ") if isinstance(level, str) else ""
    if words == "AUTOCOMMIT":
        raise ConfigurationError("isolation_level=AUTOCOMMIT would commit a listener's work apart from its message")
    if words not in LEVELS:
        raise ConfigurationError(f"isolation_level={level!r}: one of {', '.join(LEVELS)}")
    return words


def check_factory(factory: SessionFactory | None) -> None:
    """Refuse what gives no sessions."""
    if factory is None or isinstance(factory, str | URL):
        return
    if not callable(factory):
        raise ConfigurationError(
            f"session_factory={type(factory).__name__}: a URL, something that gives a session when it is called, such "
            "as an async_sessionmaker, or a function of the message that returns one of these"
        )
    if not is_factory(factory):
        check_takes(factory, "the message", what="session_factory")


def is_factory(factory: Callable[..., Any]) -> bool:
    """Whether it gives sessions itself: what can be called without arguments does, anything else asks for a message."""
    return _takes(factory, 0)


def check_on_error(on_error: OnError | None) -> None:
    """Refuse what cannot be called with what `on_error` is told."""
    if on_error is None:
        return
    if not callable(on_error) or not _takes(on_error, 4):
        raise ConfigurationError(
            f"on_error={on_error!r}: a function of four arguments: the error, the message, a session and the attempt"
        )


def check_takes(function: Callable[..., Any], argument: str, *, what: str) -> None:
    """Refuse a function that is not one of one argument, or whose answer would have to be awaited."""
    if is_async(function):
        raise ConfigurationError(f"{what} is asked before anything runs: make {function!r} a plain function, not async")
    if not _takes(function, 1):
        raise ConfigurationError(f"{what}={function!r}: a function of one argument, {argument}")


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True  # it has no signature to read: it is written in C
    return True
