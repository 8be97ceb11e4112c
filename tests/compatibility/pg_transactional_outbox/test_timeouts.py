""" "Message processing timeout strategy". Its seconds run here as fractions of one.

The ruling: 15 seconds for a listener that asks for a session, because its transaction holds up others; none for one
that does not.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, Outbox, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled
from outbox.inbound.invocation import SESSION_TIME_LIMIT
from tests.compatibility.pg_transactional_outbox.movies import Shelf, incoming, tell
from tests.support.databases import on_both_stores, on_every_driver
from tests.support.observing import PATIENCE, Recorder, eventually

SHORT = 0.05
LONG = 30.0
A_WHILE = 0.3  # seconds: longer than the short timeout, and far from the long one


def outcomes(recorder: Recorder) -> dict[str, type]:
    """How the last attempt at each kind of message ended."""
    return {event.attempt.message.routing_key: type(event.outcome) for event in recorder.of(Handled)}


@pytest.mark.parametrize("asks_for_a_session", [False, True])
async def test_an_expensive_message_gets_more_time_than_others(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf, asks_for_a_session: bool
) -> None:
    def timeout_strategy(message: Message) -> float:
        return LONG if message.routing_key == "movie.ABC" else SHORT

    async def alone(movie: dict[str, str]) -> None:
        await asyncio.sleep(A_WHILE)

    async def with_a_session(movie: dict[str, str], session: AsyncSession) -> None:
        await session.execute(published_movies.put(movie["title"]))
        await asyncio.sleep(A_WHILE)

    options = {"queue": "movies", "timeout": timeout_strategy, "retry_delays": ()}
    handle = listen("movie.*", **options)(with_a_session if asks_for_a_session else alone)  # type: ignore[arg-type]
    async with outbox.running(listeners=[handle]):
        await tell(outbox, "expensive", routing_key="movie.ABC")
        await tell(outbox, "cheap", routing_key="movie.other")
        await recorder.wait_for(Handled, 2)
    assert outcomes(recorder) == {"movie.ABC": Done, "movie.other": Dead}
    assert await published_movies.titles() == (["expensive"] if asks_for_a_session else [])


@on_every_driver
async def test_a_message_that_runs_out_of_time_leaves_nothing_and_is_tried_again(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    """However long the machine takes for an attempt that should be quick: then it is tried once more."""

    @listen("movie.*", queue="movies", timeout=0.2, retry_delays=(0,) * 50)
    async def handle(movie: dict[str, str], session: AsyncSession, attempt_count: int) -> None:
        await session.execute(published_movies.put(f"{movie['title']}, attempt {attempt_count}"))
        if attempt_count == 1:
            await asyncio.sleep(PATIENCE)

    async with outbox.running(listeners=[handle]):
        await tell(outbox, "some movie")
        [done] = await eventually(lambda: [each for each in recorder.of(Handled) if isinstance(each.outcome, Done)])
    first = recorder.of(Handled)[0]
    assert isinstance(first.outcome, RetryIn)
    assert "TimeoutError" in first.outcome.error
    assert done.attempt.attempt_count > 1
    assert await published_movies.titles() == [f"some movie, attempt {done.attempt.attempt_count}"]


async def test_where_nothing_else_is_said_a_session_is_given_fifteen_seconds(
    outbox: Outbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timedelta(seconds=15) == SESSION_TIME_LIMIT
    monkeypatch.setattr("outbox.worker_factory.SESSION_TIME_LIMIT", timedelta(seconds=SHORT))

    @listen("#", queue="with a session", retry_delays=())
    async def with_a_session(movie: object, session: AsyncSession) -> None:
        await asyncio.sleep(A_WHILE)

    @listen("#", queue="undecided", retry_delays=(), timeout=lambda message: None)
    async def undecided(movie: object, session: AsyncSession) -> None:
        await asyncio.sleep(A_WHILE)

    @listen("#", queue="configured", retry_delays=(), timeout=LONG)
    async def configured(movie: object, session: AsyncSession) -> None:
        await asyncio.sleep(A_WHILE)

    @listen("#", queue="without", retry_delays=())
    async def without(movie: object) -> None:
        await asyncio.sleep(A_WHILE)

    async with outbox.running(listeners=[with_a_session, undecided, configured, without]):
        await tell(outbox, "some movie")
        ended = await recorder.wait_for(Handled, 4)
    assert {event.queue: type(event.outcome) for event in ended} == {
        "with a session": Dead,
        "undecided": Dead,
        "configured": Done,
        "without": Done,
    }


@on_both_stores
async def test_a_message_that_was_stored_first_has_the_same_time(
    rabbitmq_outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    @listen("movie.*", queue="movies", timeout=SHORT, retry_delays=(), store_first=True)
    async def handle(movie: dict[str, str], session: AsyncSession) -> None:
        await session.execute(published_movies.put(movie["title"]))
        await asyncio.sleep(PATIENCE)

    async with rabbitmq_outbox.running(listeners=[handle]):
        assert len((await rabbitmq_outbox.transport.publish([incoming()])).confirmed) == 1
        [ended] = await recorder.wait_for(Handled)
    assert isinstance(ended.outcome, Dead)
    assert await published_movies.titles() == []
