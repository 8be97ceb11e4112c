""" "Opt-in DLQ on terminal failure" and the retry strategies that lead there.

The rulings: dead letters are kept always, not only if asked for; max_deliveries, retry_terminal and rejected are called
crashed, exhausted and rejected; and what a strategy decides is a RetryPolicy.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import (
    Binding,
    ConfigurationError,
    DeadLetter,
    Listener,
    Message,
    NotFound,
    Outbox,
    Reject,
    RetryPolicy,
    listen,
)
from outbox.core.attempt import Dead, Done, Reason
from outbox.core.events import Handled
from outbox.core.store import Selection
from outbox.observers.logging import LoggingObserver
from tests.support.databases import on_every_driver, on_postgresql, on_sqlite
from tests.support.observing import PATIENCE, Recorder, Statements, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox

LEASE = timedelta(seconds=30)


async def emit_one(outbox: Outbox, body: object = 7, **options: Any) -> Message:
    async with outbox.transaction() as session:
        message = await outbox.emit(session, "orders", body, **options)
    assert message is not None
    return message


async def queued(outbox: Outbox, count: int = 1) -> None:
    """Messages that lie in the queue `orders`."""
    await outbox.store.queues.bind([Binding("orders", "orders")])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "orders", range(count))
    await outbox.store.queues.route(count, {})


async def buried(outbox: Outbox, count: int = 1, error: str = "refused") -> list[DeadLetter]:
    """Dead letters of the queue `orders`."""
    await queued(outbox, count)
    async with outbox.store.feed.claim(Selection(limit=count, lease=LEASE, destination="orders")) as claim:
        await claim.settle({a.id: Dead(Reason.REJECTED, f"{error} {a.message.body!r}") for a in claim.attempts})
    return await outbox.dead_letters.list()


def writes(statements: list[str]) -> list[str]:
    """Those that change rows: wake-ups of the emits before may still be on their way."""
    return [statement for statement in statements if "DELETE FROM" in statement or "INSERT INTO" in statement]


def failing(error: BaseException, **options: Any) -> Listener:
    async def fails(body: bytes) -> None:
        raise error

    return listen("orders", queue="orders", **{"retry_delays": (), **options})(fails)


async def letter_of(outbox: Outbox, recorder: Recorder, error: BaseException) -> DeadLetter:
    """What is kept of a message whose listener raised this."""
    async with outbox.running(listeners=[failing(error)]):
        await emit_one(outbox)
        await recorder.wait_for(Handled)
    [letter] = await outbox.dead_letters.list()
    return letter


# What becomes a dead letter


async def test_a_success_is_a_plain_delete_and_never_archived(outbox: Outbox) -> None:
    await queued(outbox, 3)
    async with outbox.store.feed.claim(Selection(limit=3, lease=LEASE, destination="orders")) as claim:
        with Statements() as statements:
            await claim.settle({attempt.id: Done() for attempt in claim.attempts})
    [removal] = writes(statements)
    assert removal.startswith("DELETE FROM")
    assert outbox.tables.dead_letters.name not in removal
    assert await outbox.messages() == []
    assert await outbox.dead_letters.list() == []


async def test_three_ways_to_fail_for_good_have_three_reasons(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder], retry_delays=(0,))

    def listener(queue: str, error: type[Exception]) -> Listener:
        async def callback(number: int) -> None:
            raise error

        return listen("orders", queue=queue, max_crashes=1)(callback)

    queues = {"max deliveries": ConnectionError, "retry terminal": ConnectionError, "rejected": Reject}
    await outbox.store.queues.bind([Binding(queue, "orders") for queue in queues])
    await emit_one(outbox)
    await outbox.store.queues.route(10, {})
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="max deliveries")):
        await let_leases_run_out(outbox)
    async with outbox.running(listeners=[listener(queue, error) for queue, error in queues.items()]):
        await recorder.wait_for(Handled, 4)
    reasons = {letter.queue: (letter.reason, letter.attempt_count) for letter in await outbox.dead_letters.list()}
    assert reasons == {
        "max deliveries": ("crashed", 0),
        "retry terminal": ("exhausted", 2),
        "rejected": ("rejected", 1),
    }


@on_every_driver
async def test_a_dead_letter_keeps_the_unchanged_message_and_its_story(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    outbox = make_outbox(observers=[recorder])
    body = bytes(range(256))
    async with outbox.running(listeners=[failing(ConnectionError("no route"), retry_delays=(0, 0))]):
        message = await emit_one(
            outbox, body, key="k", headers={"tenant": "Ätna"}, content_type="image/png", timer_id="timer"
        )
        await recorder.wait_for(Handled, 3)
    [letter] = await outbox.dead_letters.list()
    assert letter.message == message
    assert (letter.queue, letter.reason, letter.attempt_count) == ("orders", "exhausted", 3)
    assert letter.error.startswith("ConnectionError: no route")
    story = letter.history.splitlines()
    assert len(story) == 3
    assert all(f"attempt {number}" in line and "no route" in line for number, line in enumerate(story, 1))
    assert letter.died_at >= message.created_at
    [walk] = await outbox.find(message.id)
    assert (walk.state, walk.timer_id, walk.reason) == ("dead", "timer", "exhausted")


# One statement


@on_postgresql
async def test_the_row_moves_to_the_dead_letters_in_one_statement(outbox: Outbox) -> None:
    await queued(outbox, 3)
    async with outbox.store.feed.claim(Selection(limit=3, lease=LEASE, destination="orders")) as claim:
        with Statements() as statements:
            await claim.settle({attempt.id: Dead(Reason.REJECTED) for attempt in claim.attempts})
    [burial] = writes(statements)
    assert "DELETE FROM" in burial
    assert f"INSERT INTO {outbox.tables.dead_letters.name}" in burial
    assert len(await outbox.dead_letters.list()) == 3


@asynccontextmanager
async def unwritable_dead_letters(outbox: Outbox, db_engine: AsyncEngine) -> Any:
    """A misconfiguration: while this is open the database refuses every new dead letter."""
    table = outbox.tables.dead_letters.name
    if db_engine.dialect.name == "sqlite":
        refuse = f"CREATE TRIGGER refuse BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'misconfigured'); END"
        allow = "DROP TRIGGER refuse"
    else:
        refuse = f"ALTER TABLE {table} ADD CONSTRAINT misconfigured CHECK (false) NOT VALID"
        allow = f"ALTER TABLE {table} DROP CONSTRAINT misconfigured"
    async with db_engine.begin() as connection:
        await connection.exec_driver_sql(refuse)
    yield
    async with db_engine.begin() as connection:
        await connection.exec_driver_sql(allow)


@on_every_driver
async def test_a_dead_letter_that_cannot_be_written_leaves_the_row_where_it_was(
    outbox: Outbox, db_engine: AsyncEngine
) -> None:
    await queued(outbox)
    async with (
        unwritable_dead_letters(outbox, db_engine),
        outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim,
    ):
        with pytest.raises(Exception, match="misconfigured"):
            await claim.settle({claim.attempts[0].id: Dead(Reason.REJECTED)})
        [stored] = await outbox.messages()
        assert stored.state == "queued"
    assert await outbox.dead_letters.list() == []
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE, destination="orders")) as claim:
        assert len(claim.attempts) == 1


async def test_a_worker_buries_its_message_as_soon_as_dead_letters_can_be_written_again(
    outbox: Outbox, db_engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await outbox.create_tables()
    failed = asyncio.Event()

    @listen("orders", queue="orders")
    async def rejects(number: int) -> None:
        failed.set()
        raise Reject

    async with outbox.running(listeners=[rejects]):
        async with unwritable_dead_letters(outbox, db_engine):
            await emit_one(outbox)
            await asyncio.wait_for(failed.wait(), PATIENCE)
            assert len(await outbox.messages()) == 1
        [letter] = await eventually(outbox.dead_letters.list)
    assert letter.reason == "rejected"
    assert await outbox.messages() == []


async def test_an_end_that_cannot_be_written_is_told_to_the_operator(
    outbox: Outbox, db_engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The project: misconfiguration surfaces rather than silent audit loss."""
    await outbox.create_tables()
    async with outbox.running(listeners=[failing(Reject("never"))]), unwritable_dead_letters(outbox, db_engine):
        await emit_one(outbox)
        await eventually(lambda: any(record.levelno >= logging.WARNING for record in caplog.records))


# What is kept of an error


@on_sqlite
async def test_a_long_error_is_cut_at_eight_kibibytes(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder])
    letter = await letter_of(outbox, recorder, ValueError("ä" * 10_000))
    assert letter.error.startswith("ValueError: äää")
    assert letter.error.endswith("…[cut]")
    assert 8000 < len(letter.error.encode()) <= 8 * 1024


@on_every_driver
async def test_an_error_with_control_characters_is_cleaned(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder])
    letter = await letter_of(outbox, recorder, ValueError("nul \x00 escape \x1b[31m lone \ud800 end"))
    assert "nul" in letter.error
    assert "end" in letter.error
    assert "\x00" not in letter.error
    assert "\x1b" not in letter.error


@on_sqlite
async def test_the_redaction_hook_decides_what_is_kept_logged_and_remembered(
    make_outbox: MakeOutbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = make_outbox(
        observers=[LoggingObserver(), recorder], redact_error=lambda text: text.replace("4111-1111", "****")
    )
    error = ValueError("card 4111-1111 refused")
    async with outbox.running(listeners=[failing(error, retry_delays=(0,))]):
        message = await emit_one(outbox)
        await recorder.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    [walk] = await outbox.find(message.id)
    assert "card **** refused" in letter.error
    assert "card **** refused" in letter.history
    assert "card **** refused" in caplog.text
    assert "4111-1111" not in f"{letter} {walk} {caplog.text}"


@on_sqlite
@pytest.mark.parametrize("hook", [lambda text: None, lambda text: 1 / 0], ids=["returns nothing", "raises"])
async def test_a_redaction_hook_that_fails_hides_everything_but_the_kind_of_error(
    make_outbox: MakeOutbox, recorder: Recorder, hook: Any
) -> None:
    outbox = make_outbox(observers=[recorder], redact_error=hook)
    letter = await letter_of(outbox, recorder, ValueError("card 4111-1111 refused"))
    assert letter.reason == "exhausted"
    assert "ValueError" in letter.error
    assert "4111" not in letter.error


@on_sqlite
async def test_a_redacted_text_is_still_cut(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder], redact_error=lambda text: "x" * 100_000)
    letter = await letter_of(outbox, recorder, ValueError("short"))
    assert len(letter.error.encode()) <= 8 * 1024


@on_sqlite
async def test_an_error_whose_text_cannot_be_made_is_kept_all_the_same(
    make_outbox: MakeOutbox, recorder: Recorder
) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    letter = await letter_of(make_outbox(observers=[recorder]), recorder, Broken())
    assert "Broken" in letter.error


# Looking, replaying, discarding


async def test_dead_letters_are_listed_by_queue_reason_and_error(outbox: Outbox) -> None:
    first, second, third = await buried(outbox, 3)
    assert [letter.message.body for letter in (first, second, third)] == [b"0", b"1", b"2"]
    assert await outbox.dead_letters.list(queue="nobody's") == []
    assert await outbox.dead_letters.list(reason=Reason.EXPIRED) == []
    assert len(await outbox.dead_letters.list(queue="orders", reason=Reason.REJECTED)) == 3
    assert await outbox.dead_letters.list(error="refused b'1'") == [second]
    assert await outbox.dead_letters.list(error="%") == []
    assert await outbox.dead_letters.list(limit=2) == [first, second]
    assert await outbox.dead_letters.list(after=second.id) == [third]
    assert await outbox.dead_letters.show(third.id) == third
    with pytest.raises(NotFound):
        await outbox.dead_letters.show(third.id + 1000)


async def test_a_replay_tries_again_where_the_message_died_with_fresh_attempts(
    outbox: Outbox, recorder: Recorder
) -> None:
    letters = await buried(outbox, 2)
    arrivals: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    @listen("orders", queue="orders")
    async def orders(number: int, attempt_count: int) -> None:
        await arrivals.put((number, attempt_count))

    async with outbox.running(listeners=[orders]):
        assert await outbox.dead_letters.replay([letters[1].id, letters[1].id, 10_000]) == 1
        assert await arrival(arrivals) == (1, 1)
        await recorder.wait_for(Handled)
    assert await outbox.dead_letters.list() == letters[:1]


async def test_a_replay_keeps_the_message_and_its_id(outbox: Outbox) -> None:
    [letter] = await buried(outbox)
    await outbox.dead_letters.replay([letter.id])
    [stored] = await outbox.messages()
    assert (stored.message, stored.queue) == (letter.message, "orders")


async def test_an_expired_message_can_be_replayed(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder])

    @listen("orders", queue="orders")
    async def orders(number: int) -> None: ...

    async with outbox.running(listeners=[orders]):
        await emit_one(outbox, eta=datetime.now(UTC) - timedelta(hours=1), expiration=1)
        [letter] = await eventually(outbox.dead_letters.list)
        assert letter.reason == "expired"
        await outbox.dead_letters.replay([letter.id])
        [handled] = await recorder.wait_for(Handled)
    assert handled.outcome == Done()
    assert await outbox.dead_letters.list() == []


async def test_two_replays_at_the_same_time_revive_a_letter_once(make_outbox: MakeOutbox) -> None:
    first, second = make_outbox(), make_outbox()
    letters = await buried(first, 20)
    ids = [letter.id for letter in letters]
    counts = await asyncio.gather(first.dead_letters.replay(ids), second.dead_letters.replay(ids))
    assert sum(counts) == 20
    assert len(await first.messages()) == 20


@on_sqlite
async def test_a_discarded_letter_is_gone_for_good(outbox: Outbox) -> None:
    letters = await buried(outbox, 2)
    assert await outbox.dead_letters.discard([letters[0].id]) == 1
    assert await outbox.dead_letters.discard([letters[0].id]) == 0
    assert await outbox.dead_letters.list() == letters[1:]
    assert await outbox.messages() == []


@on_sqlite
async def test_a_message_that_dies_again_is_a_dead_letter_again(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    outbox = make_outbox(observers=[recorder])
    async with outbox.running(listeners=[failing(ConnectionError("again"))]):
        await emit_one(outbox)
        await recorder.wait_for(Handled)
        [letter] = await outbox.dead_letters.list()
        await outbox.dead_letters.replay([letter.id])
        await recorder.wait_for(Handled, 2)
    [again] = await outbox.dead_letters.list()
    assert again.message == letter.message
    assert (again.reason, again.attempt_count) == ("exhausted", 1)


# Retry strategies


def seconds(policy: RetryPolicy, count: int, error: BaseException | None = None) -> list[float | None]:
    """The delays after the first attempts."""
    delays = [policy.delay(number, error or ConnectionError()) for number in range(1, count + 1)]
    return [None if delay is None else delay.total_seconds() for delay in delays]


def test_constant_linear_and_exponential_delays() -> None:
    assert seconds(RetryPolicy.constant(5), 4) == [5, 5, 5, 5]
    assert seconds(RetryPolicy.linear(2), 4) == [2, 4, 6, 8]
    assert seconds(RetryPolicy.linear(2, 10), 4) == [2, 12, 22, 32]
    assert seconds(RetryPolicy.exponential(1), 5) == [1, 2, 4, 8, 16]
    assert seconds(RetryPolicy.exponential(timedelta(seconds=2), 3), 3) == [2, 6, 18]


def test_attempts_are_counted_with_the_first() -> None:
    assert seconds(RetryPolicy.constant(5, attempts=3), 4) == [5, 5, None, None]
    assert seconds(RetryPolicy.constant(5, attempts=1), 1) == [None]
    assert seconds(RetryPolicy.sequence(()), 1) == [None]


def test_a_cap_bounds_each_delay_and_a_total_bounds_them_together() -> None:
    assert seconds(RetryPolicy.exponential(1, cap=5), 5) == [1, 2, 4, 5, 5]
    assert seconds(RetryPolicy.exponential(1, total=10), 5) == [1, 2, 4, None, None]
    assert seconds(RetryPolicy.constant(5, total=timedelta(seconds=10)), 3) == [5, 5, None]


def test_jitter_spreads_delays_around_their_length() -> None:
    policy = RetryPolicy.constant(10, jitter=0.2)
    delays = [delay for _ in range(500) if (delay := policy.delay(1, ConnectionError())) is not None]
    assert min(delays) >= timedelta(seconds=8)
    assert max(delays) <= timedelta(seconds=12)
    assert max(delays) - min(delays) > timedelta(seconds=2)


def test_no_jitter_exceeds_the_cap() -> None:
    """The project spreads first and clamps then; `cap` says that no single delay is longer."""
    policy = RetryPolicy.exponential(10, cap=10, jitter=0.5)
    delays = [delay for _ in range(500) if (delay := policy.delay(3, ConnectionError())) is not None]
    assert max(delays) <= timedelta(seconds=10)


def test_delays_never_overflow() -> None:
    for policy in (RetryPolicy.exponential(1), RetryPolicy.exponential(1, 1e6, jitter=1.0), RetryPolicy.linear(10**6)):
        delay = policy.delay(100_000, ConnectionError())
        assert delay is not None
        assert delay <= timedelta(days=2 * 36_525)


def test_a_policy_can_choose_by_the_kind_of_error() -> None:
    policy = RetryPolicy.constant(1, only=OSError, never=FileNotFoundError)
    assert seconds(policy, 1, ConnectionError()) == [1]
    assert seconds(policy, 1, FileNotFoundError()) == [None]
    assert seconds(policy, 1, ValueError()) == [None]
    assert seconds(policy, 1, Reject()) == [None]


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"jitter": -0.1}, {"jitter": 2}, {"cap": -1}, {"total": float("nan")}]
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, ValueError)):
        RetryPolicy.constant(1, **options)


@pytest.mark.parametrize(
    "strategy",
    [lambda attempt_count, error: 1 / 0, lambda attempt_count, error: "soon", lambda attempt_count, error: -1],
    ids=["raises", "returns no time", "returns a negative time"],
)
@on_sqlite
async def test_a_strategy_that_fails_ends_in_a_dead_letter_and_loses_nothing(
    make_outbox: MakeOutbox, recorder: Recorder, strategy: Any
) -> None:
    outbox = make_outbox(observers=[recorder], retry_delays=strategy)
    async with outbox.running(listeners=[failing(ConnectionError("the first error"), retry_delays=None)]):
        await emit_one(outbox)
        await recorder.wait_for(Handled)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.message.body) == ("exhausted", b"7")
    assert "the first error" in letter.error
