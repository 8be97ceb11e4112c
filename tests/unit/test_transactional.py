"""Transactional: which functions can be given a session, and how they look to others."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import ConfigurationError, Outbox
from outbox.core.callables import with_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession as NotThere

outbox = Outbox(db_engine_url="sqlite://")


class OwnSession(AsyncSession): ...


async def first(session: AsyncSession, number: int) -> int: ...
async def last(number: int, session: AsyncSession) -> int: ...
async def by_name(number: int, *, session: AsyncSession) -> int: ...
async def annotated(number: int, session: Annotated[AsyncSession, "theirs"]) -> int: ...
async def optional(number: int, session: AsyncSession | None = None) -> int: ...
async def spelt_otherwise(number: int, session: Optional[AsyncSession]) -> int: ...  # noqa: UP045
async def of_their_own(number: int, session: OwnSession) -> int: ...
async def beside_what_comes_later(number: Later, session: AsyncSession) -> int: ...
def plain(number: int, session: Session) -> int: ...


Later = int


@pytest.mark.parametrize(
    "function",
    [first, last, by_name, annotated, optional, spelt_otherwise, of_their_own, beside_what_comes_later, plain],
)
def test_the_session_is_found_by_its_annotation_and_hidden_from_others(function: Callable[..., Any]) -> None:
    wrapped = outbox.transactional(function)
    assert list(inspect.signature(wrapped).parameters) == ["number"]
    assert inspect.signature(wrapped).return_annotation is int
    assert inspect.iscoroutinefunction(wrapped) == inspect.iscoroutinefunction(function)
    assert (wrapped.__name__, wrapped.__module__) == (function.__name__, __name__)


class Handler:
    async def __call__(self, number: int, session: AsyncSession) -> int: ...


def test_whatever_can_be_called_can_be_transactional() -> None:
    for function in (Handler(), functools.partial(by_name), functools.partial(last)):
        wrapped = outbox.transactional(function)
        assert list(inspect.signature(wrapped).parameters) == ["number"]
        assert inspect.iscoroutinefunction(wrapped)


async def no_session(number: int) -> None: ...
async def not_annotated(session) -> None: ...  # type: ignore[no-untyped-def]
async def two(one: AsyncSession, other: AsyncSession) -> None: ...
async def not_imported(session: NotThere) -> None: ...
async def without_a_name(session: AsyncSession, /) -> None: ...
async def many(*sessions: AsyncSession) -> None: ...
async def by_any_name(**sessions: AsyncSession) -> None: ...
async def blocking(session: Session) -> None: ...
def cannot_await(session: AsyncSession) -> None: ...


async def async_generator(session: AsyncSession) -> AsyncIterator[int]:
    yield 1


def generator(session: Session) -> Iterator[int]:
    yield 1


@contextmanager
def context(session: Session) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (no_session, "annotated AsyncSession or Session, found 0"),
        (not_annotated, "annotated AsyncSession or Session, found 0"),
        (not_imported, "TYPE_CHECKING"),
        (two, "exactly one .* found 2"),
        (without_a_name, "remove the `/`"),
        (many, "needs a name"),
        (by_any_name, "needs a name"),
        (blocking, "ask for AsyncSession"),
        (cannot_await, "make it `async def`"),
        (async_generator, r"use `async with transaction\(\)`"),
        (generator, r"use `async with transaction\(\)`"),
        (context, r"use `async with transaction\(\)`"),
    ],
)
def test_what_cannot_work_is_refused_with_advice_before_it_is_called(function: Callable[..., Any], advice: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{function.__name__}.*{advice}"):
        outbox.transactional(function)


def test_methods_of_a_class_are_transactional_below_what_makes_them_so() -> None:
    def place(number: int, session: Session) -> None: ...

    for kind in (classmethod, staticmethod):
        with pytest.raises(ConfigurationError, match=f"place: write @{kind.__name__} above"):
            outbox.transactional(kind(place))  # type: ignore[arg-type]


async def test_a_partial_function_still_tells_a_worker_of_its_session() -> None:
    async def place(prefix: str, number: int, session: AsyncSession) -> None: ...

    wrapped = functools.partial(outbox.transactional(place), "a")
    assert list(inspect.signature(wrapped).parameters) == ["number"]
    assert list(inspect.signature(with_session(wrapped)).parameters) == ["number", "session"]
