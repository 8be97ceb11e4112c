""" "Retries and dead-lettering". Its delays of seconds run here as fractions of one.

The rulings: `retry_delays=()` means no retries, a delay of 0 retries at once, a retry goes only to the queue that
failed, and dead letters lie in a table instead of a `.dlq` queue.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import ConfigurationError, Message, Outbox, Reject, RetryPolicy, TimeInvalid, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import CleanedUp, Handled
from outbox.observers.logging import LoggingObserver
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox

from .users import JOHN, emit_and_commit, is_order_processed, skipping_duplicates

DELAYS = (0.05, 0.1, 0.02, 0.08)


def delays_between(recorder: Recorder) -> list[float]:
    """The delays that the failed attempts were given."""
    return [event.outcome.delay.total_seconds() for event in recorder.of(Handled) if isinstance(event.outcome, RetryIn)]


# Configuring retry delays


async def test_each_failure_waits_for_its_own_delay_and_the_fifth_is_dead(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(retry_delays=DELAYS, observers=[recorder])
    attempts: list[tuple[int, float]] = []

    @listen("user.created", queue="fails")
    async def fails(user: object, attempt_count: int) -> None:
        attempts.append((attempt_count, time.monotonic()))
        raise ConnectionError("Will retry with configured delays")

    async with outbox.running(listeners=[fails]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 5)
    assert [number for number, _ in attempts] == [1, 2, 3, 4, 5]
    waited = [later - earlier for (_, earlier), (_, later) in pairwise(attempts)]
    assert all(actual > wanted - 0.005 for actual, wanted in zip(waited, DELAYS, strict=True))
    assert delays_between(recorder) == list(DELAYS)
    [letter] = await outbox.dead_letters.list()
    assert (letter.queue, letter.reason, letter.attempt_count) == ("fails", "exhausted", 5)
    assert "Will retry with configured delays" in letter.error
    assert letter.history.count("Will retry with configured delays") == 5
    assert await outbox.messages() == []


def test_the_default_delays_are_one_ten_sixty_and_three_hundred_seconds() -> None:
    policy = Outbox(db_engine_url="sqlite+aiosqlite:///never.db").settings.policy("retry_delays")
    delays = [policy.delay(number, Exception()) for number in (1, 2, 3, 4, 5)]
    assert [delay and delay.total_seconds() for delay in delays] == [1, 10, 60, 300, None]


@on_sqlite
async def test_a_listeners_own_delays_override_those_of_setup(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(retry_delays=(60, 60, 60), observers=[recorder])

    @listen("user.created", queue="own", retry_delays=(0.01, timedelta(milliseconds=20)))
    async def own(user: object) -> None:
        raise ConnectionError

    async with outbox.running(listeners=[own]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 3)
    assert delays_between(recorder) == [0.01, 0.02]
    [letter] = await outbox.dead_letters.list()
    assert letter.attempt_count == 3


async def test_without_retry_delays_a_failure_goes_straight_to_the_dead_letters(
    outbox: Outbox, recorder: Recorder
) -> None:
    @listen("user.deleted", retry_delays=(), queue="once")  # No retries - straight to DLQ on failure
    async def on_user_deleted(user: object) -> None:
        raise ConnectionError

    async with outbox.running(listeners=[on_user_deleted]):
        await emit_and_commit(outbox, "user.deleted")
        [handled] = await recorder.wait_for(Handled)
    assert isinstance(handled.outcome, Dead)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("exhausted", 1)


@on_sqlite
async def test_setup_without_retry_delays_means_no_retries_for_anybody(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(retry_delays=(), observers=[recorder])

    @listen("user.created", queue="once")
    async def once(user: object) -> None:
        raise ConnectionError

    async with outbox.running(listeners=[once]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled)
    [letter] = await outbox.dead_letters.list()
    assert letter.attempt_count == 1


@on_sqlite
async def test_a_delay_of_zero_retries_at_once(outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="at once", retry_delays=(0, 0, 0, 0, 0))
    async def at_once(user: object, attempt_count: int) -> None:
        if attempt_count < 6:
            raise ConnectionError

    async with outbox.running(listeners=[at_once]):
        await emit_and_commit(outbox)
        handled = await recorder.wait_for(Handled, 6)
    assert handled[-1].outcome == Done()
    assert await outbox.dead_letters.list() == []


async def test_reject_bypasses_all_retries(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(retry_delays=(60, 60), observers=[recorder])

    @listen("user.created", queue="rejects", retry_delays=(5, 30))
    async def rejects(user: object) -> None:
        raise Reject("permanent")

    @listen("user.created", queue="rejects without a word")
    async def silently(user: object) -> None:
        raise Reject

    async with outbox.running(listeners=[rejects, silently]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 2)
    letters = {letter.queue: letter for letter in await outbox.dead_letters.list()}
    assert {letter.reason for letter in letters.values()} == {"rejected"}
    assert {letter.attempt_count for letter in letters.values()} == {1}
    assert "permanent" in letters["rejects"].error


@on_sqlite
async def test_a_reject_after_failures_ends_the_retries(outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="gives up", retry_delays=(0, 0, 0, 0))
    async def gives_up(user: object, attempt_count: int) -> None:
        raise Reject if attempt_count == 2 else ConnectionError

    async with outbox.running(listeners=[gives_up]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("rejected", 2)


@on_every_driver
async def test_a_retry_goes_only_to_the_queue_that_failed(outbox: Outbox, recorder: Recorder) -> None:
    seen: list[str] = []

    @listen("user.created", queue="fails", retry_delays=(0.02, 0.02))
    async def fails(user: object, routing_key: str) -> None:
        seen.append(f"fails {routing_key}")
        if seen.count("fails user.created") < 3:
            raise ConnectionError

    @listen("user.*", queue="succeeds")
    async def succeeds(user: object) -> None:
        seen.append("succeeds")

    async with outbox.running(listeners=[fails, succeeds]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 4)
    assert sorted(seen) == ["fails user.created"] * 3 + ["succeeds"]
    assert await outbox.messages() == []


@on_sqlite
async def test_a_failing_message_holds_up_no_other(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("user.created", queue="one fails", retry_delays=(60,), concurrency=1)
    async def one_fails(id: int) -> None:
        if id == 0:
            raise ConnectionError
        await arrivals.put(id)

    async with outbox.running(listeners=[one_fails]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "user.created", range(5))
        assert [await arrival(arrivals) for _ in range(4)] == [1, 2, 3, 4]
        [stored] = await eventually(lambda: outbox.messages(state="retrying"))
    assert stored.message.body == b"0"


@on_sqlite
async def test_whatever_a_listener_raises_is_an_attempt_and_never_ends_the_worker(
    outbox: Outbox, recorder: Recorder
) -> None:
    errors: list[type[BaseException]] = [ValueError, SystemExit, asyncio.CancelledError, TimeoutError, StopIteration]
    seen: list[int] = []

    @listen("user.created", queue="raises", retry_delays=(0,) * len(errors), concurrency=1)
    async def raises(user: object, attempt_count: int) -> None:
        seen.append(attempt_count)
        if attempt_count <= len(errors):
            raise errors[attempt_count - 1]

    async with outbox.running(listeners=[raises]):
        await emit_and_commit(outbox)
        handled = await recorder.wait_for(Handled, len(errors) + 1)
    assert seen == list(range(1, len(errors) + 2))
    assert handled[-1].outcome == Done()


@on_sqlite
async def test_a_listener_that_outlasts_its_timeout_has_failed(outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="hangs", timeout=0.1, retry_delays=(0,))
    async def hangs(user: object) -> None:
        await asyncio.Event().wait()

    async with outbox.running(listeners=[hangs]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == ("exhausted", 2)
    assert "TimeoutError" in letter.error


# Expiration


async def test_an_expiration_limits_all_retries_together(outbox: Outbox, recorder: Recorder) -> None:
    """No attempt prolongs it, and the one that it passes in is the last, however many delays are left."""
    ends: list[datetime | None] = []
    messages = outbox.tables.messages

    @listen("user.created", queue="expires", retry_delays=(0.02,) * 100)
    async def expires(user: object, message: Message) -> None:
        ends.append(message.expires_at)
        if len(ends) == 3:
            long_ago = datetime.now(UTC) - timedelta(hours=1)
            async with outbox.transaction() as session:
                await session.execute(messages.update().values(expires_at=long_ago))
        raise ConnectionError

    async with outbox.running(listeners=[expires]):
        await emit_and_commit(outbox, expiration=3600)
        [letter] = await eventually(outbox.dead_letters.list)
    assert (letter.reason, letter.attempt_count) == ("expired", 3)
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert len(recorder.of(Handled)) == 3
    assert await outbox.messages() == []


async def test_retries_that_outlast_the_expiration_end_with_it(outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="expires", retry_delays=(0.1,) * 1000)
    async def expires(user: object) -> None:
        raise ConnectionError

    async with outbox.running(listeners=[expires]):
        await emit_and_commit(outbox, expiration=0.35)
        [letter] = await eventually(outbox.dead_letters.list)
    assert letter.reason == "expired"
    assert letter.attempt_count <= 4
    assert len(recorder.of(Handled)) == letter.attempt_count


async def test_a_message_that_expired_before_anybody_took_it_reaches_no_listener(
    outbox: Outbox, recorder: Recorder
) -> None:
    seen: list[object] = []

    @listen("user.*", queue="late")
    async def late(user: object, routing_key: str) -> None:
        seen.append(routing_key)

    await emit_and_commit(outbox, "user.expired", eta=datetime.now(UTC) - timedelta(hours=1), expiration=1)
    await emit_and_commit(outbox, "user.fresh", expiration=60)
    async with outbox.running(listeners=[late]):
        await recorder.wait_for(Handled)
        [letter] = await eventually(outbox.dead_letters.list)
    assert seen == ["user.fresh"]
    assert (letter.reason, letter.message.routing_key, letter.attempt_count) == ("expired", "user.expired", 0)


async def test_an_expired_message_that_nobody_listens_to_is_found_all_the_same(
    outbox: Outbox, recorder: Recorder
) -> None:
    @listen("other", queue="other")
    async def other(body: object) -> None: ...

    async with outbox.running(listeners=[other]):
        await emit_and_commit(outbox, expiration=0.05)
        await recorder.wait_for(CleanedUp)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.queue) == ("expired", None)


# Dead letters


async def test_dead_letters_can_be_moved_back_to_their_queue_once_the_code_is_mended(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(retry_delays=(), observers=[recorder])
    arrivals: asyncio.Queue[tuple[object, int]] = asyncio.Queue()

    async def broken(user: object) -> None:
        raise ZeroDivisionError

    async def mended(user: object, attempt_count: int) -> None:
        await arrivals.put((user, attempt_count))

    async def other(user: object) -> None:
        await arrivals.put(("other", 0))

    async with outbox.running(listeners=[listen("user.created", queue="billing")(broken)]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled)
    [letter] = await outbox.dead_letters.list(queue="billing")
    listeners = [listen("user.created", queue="billing")(mended), listen("user.created", queue="other")(other)]
    async with outbox.running(listeners=listeners):
        assert await outbox.dead_letters.replay([letter.id]) == 1
        assert await arrival(arrivals) == (JOHN, 1)
        await recorder.wait_for(Handled, 2)
    assert arrivals.empty()
    assert await outbox.dead_letters.list() == []


@on_sqlite
async def test_each_queue_has_its_own_dead_letters(outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="first", retry_delays=())
    async def first(user: object) -> None:
        raise ZeroDivisionError("first")

    @listen("user.created", queue="second", retry_delays=())
    async def second(user: object) -> None:
        raise ZeroDivisionError("second")

    async with outbox.running(listeners=[first, second]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 2)
    for queue in ("first", "second"):
        [letter] = await outbox.dead_letters.list(queue=queue)
        assert letter.queue == queue
        assert queue in letter.error


@on_sqlite
async def test_a_duplicate_can_be_skipped_as_the_project_shows(
    make_outbox: MakeOutbox, db_engine: AsyncEngine, user_model: Any, recorder: Recorder
) -> None:
    """The project's idempotent handler: the effect committed, the attempt failed, the next one finds it done."""
    outbox = make_outbox(db_engine=db_engine, observers=[recorder, LoggingObserver()])

    handler = skipping_duplicates(db_engine, user_model)
    process_order = listen("order.created", queue="orders", retry_delays=(0,))(handler)
    async with outbox.running(listeners=[process_order]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", 7)
        handled = await recorder.wait_for(Handled, 2)
    assert handled[-1].outcome == Done()
    assert await is_order_processed(db_engine, user_model, 7)


# What retry_delays may be


@pytest.mark.parametrize("delays", ["1, 10", 5, object()])
def test_retry_delays_that_are_no_delays_are_refused_at_setup(delays: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry_delays"):
        Outbox(db_engine_url="sqlite+aiosqlite:///never.db", retry_delays=delays)


@pytest.mark.parametrize("delays", [(-1,), (float("nan"),), ("1s",), (True,)])
def test_a_delay_that_is_no_time_is_refused_when_the_listener_is_declared(delays: Any) -> None:
    with pytest.raises((TimeInvalid, ConfigurationError)):
        listen("user.created", retry_delays=delays)(lambda user: None)


@on_sqlite
async def test_a_policy_by_exception_type_decides_with_the_error_at_hand(outbox: Outbox, recorder: Recorder) -> None:
    policy = RetryPolicy.constant(0, only=(ConnectionError, ValueError))

    @listen("user.created", queue="by type", retry_delays=policy)
    async def by_type(user: object, attempt_count: int) -> None:
        raise [ConnectionError, ValueError, KeyError][attempt_count - 1]

    async with outbox.running(listeners=[by_type]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 3)
    [letter] = await outbox.dead_letters.list()
    assert (letter.attempt_count, letter.reason) == (3, "exhausted")


@on_sqlite
async def test_a_function_decides_from_the_attempts_number_and_the_error(outbox: Outbox, recorder: Recorder) -> None:
    asked: list[tuple[int, str]] = []

    def decide(attempt_count: int, error: BaseException) -> float | None:
        asked.append((attempt_count, str(error)))
        return 0.01 * attempt_count if attempt_count < 3 else None

    @listen("user.created", queue="decided", retry_delays=decide)
    async def decided(user: object, attempt_count: int) -> None:
        raise ConnectionError(f"number {attempt_count}")

    async with outbox.running(listeners=[decided]):
        await emit_and_commit(outbox)
        await recorder.wait_for(Handled, 3)
    assert asked == [(1, "number 1"), (2, "number 2"), (3, "number 3")]
    assert delays_between(recorder) == [0.01, 0.02]
