"""The strategies for message retries, poisonous messages and the restart of listeners, and `handleError`.

The rulings: retries have a pause, `maxAttempts` is the number of `retry_delays` and one, a message is poisonous after
`max_crashes` starts that did not end, and what `handleError` learns of the maximum is whether an attempt was the last.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import FailedAttempt, Listener, Message, Outbox, Reason, TransportUnavailable, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled, Relayed, Troubled
from outbox.core.store import Selection
from outbox.outbound import relay
from tests.compatibility.pg_transactional_outbox.movies import MOVIE_CREATED, Shelf, incoming, is_done, tell
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox
from tests.support.program import program

LEASE = timedelta(seconds=30)


# Message retry strategy


def test_by_default_a_message_is_tried_five_times_with_a_growing_pause() -> None:
    policy = Outbox(db_engine_url="sqlite+aiosqlite://").settings.policy("retry_delays")
    pauses = [policy.delay(attempt, ConnectionError()) for attempt in (1, 2, 3, 4, 5)]
    assert pauses == [timedelta(seconds=1), timedelta(seconds=10), timedelta(minutes=1), timedelta(minutes=5), None]


@pytest.mark.parametrize("max_attempts", [1, 3, 5])
async def test_a_message_is_tried_up_to_the_configured_maximum_the_first_time_included(
    make_outbox: MakeOutbox, recorder: Recorder, max_attempts: int
) -> None:
    outbox = make_outbox(retry_delays=(0.01,) * (max_attempts - 1), observers=[recorder])
    attempts: list[int] = []

    @listen(MOVIE_CREATED, queue="movies")
    async def fails(movie: object, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[fails]):
        await tell(outbox, "some movie")
        ended = await recorder.wait_for(Handled, max_attempts)
    assert attempts == list(range(1, max_attempts + 1))
    assert [type(event.outcome) for event in ended] == [RetryIn] * (max_attempts - 1) + [Dead]
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == (Reason.EXHAUSTED, max_attempts)
    assert "the cinema is closed" in letter.error


async def test_a_strategy_of_ones_own_decides_by_the_error_and_the_number_of_the_attempt(
    outbox: Outbox, recorder: Recorder
) -> None:
    def message_retry_strategy(attempt_count: int, error: BaseException) -> float | None:
        return 0.01 * attempt_count if isinstance(error, ConnectionError) and attempt_count < 3 else None

    @listen(MOVIE_CREATED, queue="movies", retry_delays=message_retry_strategy)
    async def fails(movie: dict[str, str]) -> None:
        raise ConnectionError("away") if movie["title"] == "again" else ValueError("wrong")

    async with outbox.running(listeners=[fails]):
        await tell(outbox, "again", "never")
        await recorder.wait_for(Handled, 4)
    letters = {letter.message.body: letter.attempt_count for letter in await outbox.dead_letters.list()}
    assert letters == {b'{"title":"again"}': 3, b'{"title":"never"}': 1}
    retries = [event.outcome.delay for event in recorder.of(Handled) if isinstance(event.outcome, RetryIn)]
    assert retries == [timedelta(milliseconds=10), timedelta(milliseconds=20)]


@on_both_stores
async def test_a_message_that_fails_keeps_no_other_from_being_processed(
    rabbitmq_outbox: Outbox, recorder: Recorder
) -> None:
    """One at a time and stored first: the pause of the one that failed is not spent on waiting for it."""
    titles: list[str] = []

    @listen(MOVIE_CREATED, queue="movies", concurrency=1, retry_delays=(3600,), store_first=True)
    async def handle(movie: dict[str, str]) -> None:
        titles.append(movie["title"])
        if movie["title"] == "bad":
            raise ConnectionError("the cinema is closed")

    async with rabbitmq_outbox.running(relay=True, listeners=[handle]):
        await tell(rabbitmq_outbox, "bad", "good", "better")
        await recorder.wait_for(Handled, 3)
    assert sorted(titles) == ["bad", "better", "good"]
    [waiting] = await rabbitmq_outbox.messages(queue="movies")
    assert (waiting.state, waiting.attempt_count, waiting.message.body) == ("retrying", 1, b'{"title":"bad"}')


# handleError


async def test_the_error_handler_is_told_everything_and_has_a_transaction_of_its_own(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    told: list[tuple[str, str, int, bool, int]] = []

    async def handle_error(
        error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt
    ) -> Any:
        left = await session.scalar(text(f"SELECT count(*) FROM {published_movies.table.name} WHERE title = 'tried'"))
        told.append((str(error), message.id, attempt.attempt_count, attempt.is_last, left or 0))
        await session.execute(published_movies.put(f"compensation {attempt.attempt_count}"))
        return "permanent" if attempt.is_last else "transient"

    @listen(MOVIE_CREATED, queue="movies", retry_delays=(0, 0), on_error=handle_error)
    async def handle(movie: object, session: AsyncSession) -> None:
        await session.execute(published_movies.put("tried"))
        raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[handle]):
        [message] = await tell(outbox, "some movie")
        await recorder.wait_for(Handled, 3)
    assert told == [("the cinema is closed", message.id, current, current == 3, 0) for current in (1, 2, 3)]
    assert await published_movies.titles() == ["compensation 1", "compensation 2", "compensation 3"]


async def test_a_permanent_error_is_not_tried_again_and_what_compensates_it_is_sent(
    outbox: Outbox, recorder: Recorder
) -> None:
    arrivals: asyncio.Queue[str] = asyncio.Queue()

    async def handle_error(
        error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt
    ) -> Any:
        await outbox.emit(session, "movie.movie_refused", message.id)
        return "permanent"

    @listen(MOVIE_CREATED, queue="movies", retry_delays=(0, 0, 0), on_error=handle_error)
    async def handle(movie: object) -> None:
        raise ValueError("no such cinema")

    @listen("movie.movie_refused", queue="refused")
    async def refused(message_id: str) -> None:
        arrivals.put_nowait(message_id)

    async with outbox.running(listeners=[handle, refused]):
        [message] = await tell(outbox, "some movie")
        assert await arrival(arrivals) == message.id
        await recorder.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.message.id, letter.reason, letter.attempt_count) == (message.id, Reason.REJECTED, 1)


async def test_an_error_in_the_error_handler_leaves_the_decision_to_the_retry_strategy(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    async def handle_error(
        error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt
    ) -> Any:
        await session.execute(published_movies.put("half a compensation"))
        raise RuntimeError("the error handler fails as well")

    @listen(MOVIE_CREATED, queue="movies", retry_delays=(0,), on_error=handle_error)
    async def handle(movie: object, attempt_count: int) -> None:
        if attempt_count == 1:
            raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[handle]):
        await tell(outbox, "some movie")
        first, second = await recorder.wait_for(Handled, 2)
    assert isinstance(first.outcome, RetryIn)
    assert isinstance(second.outcome, Done)
    assert [str(event.error) for event in recorder.of(Troubled)] == ["the error handler fails as well"]
    assert await published_movies.titles() == []


# Poisonous message retry strategy


async def crash(outbox: Outbox, times: int) -> None:
    """As many workers that take the next message and are never heard of again."""
    for _ in range(times):
        async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="movies")) as claim:
            assert len(claim.attempts) == 1
            await let_leases_run_out(outbox)


@pytest.mark.parametrize(
    ("options", "crashes", "is_poisonous"),
    [({}, 2, False), ({}, 3, True), ({"max_crashes": 1}, 1, True), ({"max_crashes": 5}, 4, False)],
)
async def test_a_message_is_poisonous_after_so_many_starts_that_did_not_end(
    outbox: Outbox, recorder: Recorder, options: dict[str, int], crashes: int, is_poisonous: bool
) -> None:
    called: list[str] = []

    async def handle(movie: dict[str, str]) -> None:
        called.append(movie["title"])

    listener = Listener(MOVIE_CREATED, handle, queue="movies", **options)  # type: ignore[arg-type]
    async with outbox.running(listeners=[listener]):
        pass
    await outbox.receive("movies", incoming("suspect"))
    await crash(outbox, crashes)
    async with outbox.running(listeners=[listener]):
        [ended] = await recorder.wait_for(Handled)
    if is_poisonous:
        assert called == []
        assert isinstance(ended.outcome, Dead)
        [letter] = await outbox.dead_letters.list(queue="movies")
        assert (letter.reason, letter.attempt_count, letter.crash_count) == (Reason.CRASHED, 0, crashes)
    else:
        assert called == ["suspect"]
        assert isinstance(ended.outcome, Done)


async def test_an_attempt_that_ended_with_an_error_does_not_count_as_a_crash(
    outbox: Outbox, recorder: Recorder
) -> None:
    @listen(MOVIE_CREATED, queue="movies", retry_delays=(0,) * 5, max_crashes=2)
    async def handle(movie: object, attempt_count: int) -> None:
        if attempt_count < 5:
            raise ConnectionError("the cinema is closed")

    async with outbox.running(listeners=[handle]):
        pass
    await outbox.receive("movies", incoming())
    await crash(outbox, 1)
    async with outbox.running(listeners=[handle]):
        ended = await recorder.wait_for(Handled, 5)
    assert isinstance(ended[-1].outcome, Done)
    assert (ended[-1].attempt.attempt_count, ended[-1].attempt.crash_count) == (5, 1)


WORKER = """
    import asyncio
    import os
    import sys

    from outbox import Outbox, listen

    @listen("movie.*", queue="movies", concurrency=1, max_crashes=2)
    async def handle(movie: dict) -> None:
        print(movie["title"])
        if movie["title"] == "poison":
            os._exit(9)

    outbox = Outbox(db_engine_url=sys.argv[1], table_name=sys.argv[2], lease=60, poll_interval=0.2)
    asyncio.run(outbox.worker([handle]))
"""


async def test_a_message_that_kills_its_service_again_and_again_keeps_no_other_from_being_processed(
    outbox: Outbox, database_url: str, table_name: str
) -> None:
    handled: list[str] = []

    @listen("movie.*", queue="movies", max_crashes=2)
    async def handle(movie: dict[str, str]) -> None:
        handled.append(movie["title"])

    await tell(outbox, "poison", "healthy")
    for _ in range(2):
        async with program(WORKER, database_url, table_name) as worker:
            code, output, _ = await worker.end()
        assert code == 9
        handled.extend(output.split())
        await let_leases_run_out(outbox)
    async with outbox.running(listeners=[handle]):
        [letter] = await eventually(lambda: outbox.dead_letters.list())
        await eventually(lambda: is_done(outbox))
    assert (letter.message.body, letter.reason, letter.crash_count) == (b'{"title":"poison"}', Reason.CRASHED, 2)
    assert handled.count("poison") == 2
    assert "healthy" in handled


# Listener restart time strategy


@on_sqlite
async def test_a_listener_that_failed_starts_again_after_the_time_that_the_strategy_gives(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    asked: list[tuple[int, type]] = []
    tries: list[str] = []

    def restart_time_strategy(errors_in_a_row: int, error: BaseException) -> timedelta:
        asked.append((errors_in_a_row, type(error)))
        return timedelta(milliseconds=60)

    async def message_publisher(message: Message) -> None:
        tries.append(message.id)
        if len(tries) < 3:
            raise TimeoutError

    outbox = make_outbox(transport=message_publisher, restart_delay=restart_time_strategy, observers=[recorder])
    async with outbox.running(relay=True):
        [message] = await tell(outbox, "some movie")
        await recorder.wait_for(Relayed)
    assert tries == [message.id] * 3
    assert asked == [(1, TransportUnavailable), (2, TransportUnavailable)]
    assert [event.pause for event in recorder.of(Troubled)] == [timedelta(milliseconds=60)] * 2


@on_sqlite
@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({}, [0.2, 0.4]),
        ({"restart_delay": 0.25}, [0.25, 0.25]),
        ({"restart_delay": lambda count, error: None}, [0.2, 0.4]),
    ],
)
async def test_by_default_it_starts_again_after_a_fifth_of_a_second_and_then_less_often(
    make_outbox: MakeOutbox,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    pauses: list[float],
) -> None:
    """The project always waits a quarter of a second, which can be configured."""
    # On a slow machine a round takes so long that another begins beside it, whose error is no news then.
    monkeypatch.setattr(relay, "STUCK", 60.0)
    tries: list[str] = []

    async def message_publisher(message: Message) -> None:
        tries.append(message.id)
        if len(tries) < 3:
            raise TimeoutError

    outbox = make_outbox(transport=message_publisher, observers=[recorder], **options)
    async with outbox.running(relay=True):
        await tell(outbox, "some movie")
        await recorder.wait_for(Relayed)
    assert [event.pause.total_seconds() for event in recorder.of(Troubled)] == pauses
