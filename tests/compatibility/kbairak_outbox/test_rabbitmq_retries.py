"""Over RabbitMQ: "Retries and dead-lettering". Its delays of seconds run here as fractions of one.

The rulings: `retry_delays=()` means no retries, a delay of 0 retries at once, and a retry goes only to the queue whose
listener failed.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from aio_pika.abc import AbstractChannel
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import Outbox, Reject, listen
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import Handled
from tests.support.broker import VirtualHost
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival
from tests.support.outboxes import MakeOutbox
from tests.support.queues import bring_back, is_empty, taken

from .users import JOHN, Arrivals, is_order_processed, skipping_duplicates

DELAYS = (0.05, 0.1, 0.02, 0.08)


async def emit_and_commit(outbox: Outbox, *routing_keys: str, body: object = JOHN) -> None:
    async with outbox.transaction() as session:
        for routing_key in routing_keys:
            await outbox.emit(session, routing_key, body)


def delays_of(recorder: Recorder, queue: str) -> list[float]:
    """The delays that the failed attempts of a queue were given."""
    events = [event for event in recorder.of(Handled) if event.queue == queue]
    return [event.outcome.delay.total_seconds() for event in events if isinstance(event.outcome, RetryIn)]


# Configuring retry delays


@on_both_stores
async def test_each_failure_waits_for_its_own_delay_and_the_fifth_is_dead(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, vhost: VirtualHost, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(retry_delays=DELAYS)
    attempts: list[tuple[int, float]] = []

    @listen("user.created", queue="fails")
    async def fails(user: object, attempt_count: int) -> None:
        attempts.append((attempt_count, time.monotonic()))
        raise ConnectionError("Will retry with configured delays")

    async with outbox.running(relay=True, listeners=[fails]):
        await emit_and_commit(outbox, "user.created")
        await recorder.wait_for(Handled, 5)
        letter = await taken(channel, "fails.dlq")
    assert [number for number, _ in attempts] == [1, 2, 3, 4, 5]
    waited = [later - earlier for (_, earlier), (_, later) in pairwise(attempts)]
    assert all(actual > wanted - 0.005 for actual, wanted in zip(waited, DELAYS, strict=True))
    assert delays_of(recorder, "fails") == list(DELAYS)
    assert {name for name in vhost.exchanges() if ".delay_" in name} == {
        "outbox.delay_20ms",
        "outbox.delay_50ms",
        "outbox.delay_80ms",
        "outbox.delay_100ms",
    }
    assert letter.body == b'{"id":123,"username":"johndoe"}'
    assert (letter.headers["outbox-reason"], letter.headers["outbox-attempt"]) == ("exhausted", 5)


@on_both_stores
async def test_a_listeners_own_delays_override_those_of_setup_and_none_mean_no_retries(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(retry_delays=(0.02, 0.02, 0.02))
    some_permanent_error = "user.rejected"

    @listen("user.*", queue="own", retry_delays=(0.05, 0.03))  # Only 2 retries with these delays
    async def on_user_created(user: object, routing_key: str) -> None:
        if routing_key == some_permanent_error:
            raise Reject("permanent")  # Skip retries, send directly to DLQ
        raise Exception("Will retry with configured delays")

    @listen("user.*", queue="once", retry_delays=())  # No retries - straight to DLQ on failure
    async def on_user_deleted(user: object) -> None:
        raise ConnectionError

    @listen("user.created", queue="default")
    async def by_default(user: object) -> None:
        raise ConnectionError

    async with outbox.running(relay=True, listeners=[on_user_created, on_user_deleted, by_default]):
        await emit_and_commit(outbox, "user.created", "user.rejected")
        await recorder.wait_for(Handled, (3 + 1) + (1 + 1) + 4)
        letters = [await taken(channel, f"{queue}.dlq") for queue in ("own", "own", "once", "once", "default")]
    assert delays_of(recorder, "own") == [0.05, 0.03]
    assert delays_of(recorder, "once") == []
    assert delays_of(recorder, "default") == [0.02, 0.02, 0.02]
    told = sorted(
        (
            letter.headers["outbox-queue"],
            letter.headers["outbox-routing-key"],
            letter.headers["outbox-reason"],
            letter.headers["outbox-attempt"],
        )
        for letter in letters
    )
    assert told == [
        ("default", "user.created", "exhausted", 4),
        ("once", "user.created", "exhausted", 1),
        ("once", "user.rejected", "exhausted", 1),
        ("own", "user.created", "exhausted", 3),
        ("own", "user.rejected", "rejected", 1),
    ]
    assert [str(letter.headers["outbox-error"]).splitlines()[0] for letter in letters[:2]].count(
        "Reject: permanent"
    ) == 1


@on_sqlite
async def test_setup_without_retry_delays_makes_no_delay_and_retries_nothing(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, vhost: VirtualHost, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(retry_delays=())

    @listen("user.created", queue="once")
    async def once(user: object) -> None:
        raise ConnectionError

    async with outbox.running(relay=True, listeners=[once]):
        await emit_and_commit(outbox, "user.created")
        letter = await taken(channel, "once.dlq")
    assert letter.headers["outbox-attempt"] == 1
    assert not [name for name in vhost.exchanges() if ".delay_" in name]


@on_sqlite
async def test_a_delay_of_zero_retries_at_once(rabbitmq_outbox: Outbox, recorder: Recorder) -> None:
    @listen("user.created", queue="at once", retry_delays=(0, 0, 0, 0, 0))
    async def at_once(user: object, attempt_count: int) -> None:
        if attempt_count < 6:
            raise ConnectionError

    async with rabbitmq_outbox.running(relay=True, listeners=[at_once]):
        await emit_and_commit(rabbitmq_outbox, "user.created")
        handled = await recorder.wait_for(Handled, 6)
    assert handled[-1].outcome == Done()


@on_both_stores
async def test_a_retry_goes_only_to_the_queue_that_failed_and_shows_its_first_routing_key(
    rabbitmq_outbox: Outbox, recorder: Recorder
) -> None:
    seen: list[str] = []

    @listen("user.created", queue="fails", retry_delays=(0.02, 0.02))
    async def fails(user: object, routing_key: str) -> None:
        seen.append(f"fails {routing_key}")
        if seen.count("fails user.created") < 3:
            raise ConnectionError

    @listen("user.*", queue="succeeds", retry_delays=(0.02,))
    async def succeeds(user: object) -> None:
        seen.append("succeeds")

    @listen("#", queue="hears everything", retry_delays=())
    async def hears_everything(body: object, routing_key: str) -> None:
        seen.append(f"everything {routing_key}")

    async with rabbitmq_outbox.running(relay=True, listeners=[fails, succeeds, hears_everything]):
        await emit_and_commit(rabbitmq_outbox, "user.created")
        await recorder.wait_for(Handled, 5)
    assert sorted(seen) == ["everything user.created", *["fails user.created"] * 3, "succeeds"]


@on_sqlite
async def test_a_failing_message_holds_up_no_other(
    rabbitmq_outbox: Outbox, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    @listen("user.created", queue="one fails", retry_delays=(300,), concurrency=1)
    async def one_fails(id: int) -> None:
        if id == 0:
            raise ConnectionError
        arrivals.put_nowait(id)

    async with rabbitmq_outbox.running(relay=True, listeners=[one_fails]):
        async with rabbitmq_outbox.transaction() as session:
            await rabbitmq_outbox.emit_many(session, "user.created", range(5))
        assert sorted([await arrival(arrivals) for _ in range(4)]) == [1, 2, 3, 4]
        waiting = await taken(channel, "outbox.delay_300s")
    assert waiting.body == b"0"


# Dead-letter queues


@on_both_stores
async def test_a_dead_letter_is_the_message_itself_with_the_reason_attached(
    make_rabbitmq_outbox: MakeOutbox, recorder: Recorder, channel: AbstractChannel
) -> None:
    outbox = make_rabbitmq_outbox(retry_delays=(0.02,))

    @listen("user.created", queue="billing")
    async def broken(user: object, attempt_count: int) -> None:
        raise ZeroDivisionError(f"attempt {attempt_count}")

    async with outbox.running(relay=True, listeners=[broken]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit(session, "user.created", JOHN, key="123", headers={"tenant": "a"})
        letter = await taken(channel, "billing.dlq")
    assert emitted is not None
    assert (letter.exchange, letter.routing_key) == ("outbox.dlx", "billing")
    assert (letter.body, letter.content_type, letter.message_id) == (emitted.body, "application/json", emitted.id)
    assert letter.delivery_mode == 2
    headers = letter.headers
    assert (headers["tenant"], headers["outbox-key"]) == ("a", "123")
    assert (headers["outbox-queue"], headers["outbox-routing-key"]) == ("billing", "user.created")
    assert (headers["outbox-reason"], headers["outbox-attempt"]) == ("exhausted", 2)
    assert str(headers["outbox-error"]).startswith("ZeroDivisionError: attempt 2")
    assert "in broken" in str(headers["outbox-error"])
    history = str(headers["outbox-history"]).splitlines()
    assert ["attempt 1" in line for line in history] == [True, False]
    assert "attempt 2 was the last, exhausted" in history[1]
    assert int(str(headers["outbox-died-at"])) >= int(str(headers["outbox-created-at"]))
    assert "x-death" not in headers
    assert await is_empty(channel, "billing")


@on_both_stores
async def test_dead_letters_that_are_moved_back_to_their_queue_begin_anew_once_the_code_is_mended(
    make_rabbitmq_outbox: MakeOutbox, arrivals: Arrivals, recorder: Recorder, channel: AbstractChannel
) -> None:
    """As RabbitMQ's shovel moves them: with all their headers, through the default exchange."""
    outbox = make_rabbitmq_outbox(retry_delays=(0.02,))

    async def broken(user: object) -> None:
        raise ZeroDivisionError

    async def mended(user: object, attempt_count: int, routing_key: str) -> None:
        arrivals.put_nowait((user, attempt_count, routing_key))
        if attempt_count == 1:
            raise ConnectionError("a weak moment")

    async def other(user: object) -> None:
        arrivals.put_nowait("other")

    async with outbox.running(relay=True, listeners=[listen("user.created", queue="billing")(broken)]):
        await emit_and_commit(outbox, "user.created")
        letter = await taken(channel, "billing.dlq")
    listeners = [listen("user.created", queue="billing")(mended), listen("user.created", queue="other")(other)]
    async with outbox.running(listeners=listeners):
        await bring_back(channel, letter)
        assert await arrival(arrivals) == (JOHN, 1, "user.created")
        assert await arrival(arrivals) == (JOHN, 2, "user.created")
        handled = await recorder.wait_for(Handled, 4)
    assert handled[-1].outcome == Done()
    assert arrivals.empty()
    assert await is_empty(channel, "billing.dlq")


# Idempotency


@on_sqlite
async def test_a_duplicate_can_be_skipped_as_the_project_shows(
    rabbitmq_outbox: Outbox, db_engine: AsyncEngine, user_model: Any, recorder: Recorder
) -> None:
    handler = skipping_duplicates(db_engine, user_model)
    process_order = listen("order.created", queue="orders", retry_delays=(0,))(handler)
    async with rabbitmq_outbox.running(relay=True, listeners=[process_order]):
        await emit_and_commit(rabbitmq_outbox, "order.created", body=7)
        handled = await recorder.wait_for(Handled, 2)
    assert handled[-1].outcome == Done()
    assert await is_order_processed(db_engine, user_model, 7)
