"""A relay that reads the log: in commit order, and nothing is lost or left."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Outbox
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Relayed

from .conftest import Place

pytestmark = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])

Make = Any


async def test_messages_go_out_in_commit_order_and_leave_the_table(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    await emit("before")
    async with outbox.running(relay=True):
        async with outbox.transaction() as late:
            await outbox.emit(late, "order.created", b"late")
            await emit("early")
        await emit("a", "b")
        assert await place.until(5) == ["before", "early", "late", "a", "b"]
        await until_empty()


async def test_what_is_rolled_back_never_goes_out(outbox: Outbox, emit: Any, place: Place, until_empty: Any) -> None:
    async with outbox.running(relay=True):
        with pytest.raises(ZeroDivisionError):
            async with outbox.transaction() as session:
                await outbox.emit(session, "order.created", b"rolled back")
                raise ZeroDivisionError
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", b"kept")
            savepoint = await session.begin_nested()
            await outbox.emit(session, "order.created", b"in a savepoint")
            await savepoint.rollback()
            await outbox.emit(session, "order.created", b"behind it")
        await emit("last")
        assert await place.until(3) == ["kept", "behind it", "last"]
        await until_empty()


async def test_what_is_not_due_waits_in_the_table(outbox: Outbox, emit: Any, place: Place, until_empty: Any) -> None:
    async with outbox.running(relay=True):
        await emit("later", eta=timedelta(seconds=1.5))
        await emit("now")
        assert await place.until(1) == ["now"]
        async with asyncio.timeout(1.4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.7):
                    await place.until(2)
        assert await place.until(2) == ["now", "later"]
        await until_empty()


async def test_a_cancelled_timer_never_goes_out(outbox: Outbox, emit: Any, place: Place, until_empty: Any) -> None:
    async with outbox.running(relay=True):
        await emit("timer", eta=timedelta(seconds=1), timer_id="t")
        async with outbox.transaction() as session:
            assert await outbox.cancel_timer(session, "t")
        await emit("now")
        await place.until(1)
        await until_empty()
        assert place.bodies == ["now"]


async def test_a_refused_message_is_tried_again_and_then_dead(
    make: Make, outbox: Outbox, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    relay = make(relay_retry_delays=(0.1, 0.1))
    place.refused.add("bad")
    async with relay.running(relay=True):
        await emit("bad", "good")
        await place.until(1)
        await until_empty()
    assert place.asked == ["bad", "good", "bad", "bad"]
    outcomes = [type(each.outcome) for each in recorder.of(Relayed)]
    assert sorted(outcomes, key=str) == sorted([RetryIn, Done, RetryIn, Dead], key=str)
    [letter] = await outbox.dead_letters.list()
    assert (letter.message.body, letter.attempt_count) == (b"bad", 3)


async def test_an_expired_message_is_a_dead_letter(outbox: Outbox, emit: Any, place: Place, until_empty: Any) -> None:
    await emit("too late", expiration=0.2)
    await asyncio.sleep(0.5)
    async with outbox.running(relay=True):
        await emit("in time")
        assert await place.until(1) == ["in time"]
        await until_empty()
    [letter] = await outbox.dead_letters.list()
    assert letter.reason == "expired"


async def test_one_that_expires_while_it_waits_for_the_destination_is_not_sent(
    outbox: Outbox, make: Make, emit: Any, place: Place, until_empty: Any
) -> None:
    relay = make(batch_size=1)
    place.opened.clear()
    async with relay.running(relay=True):
        await emit("1", "2", "3", "4")  # a relay has as many batches under way at once
        await emit("late", expiration=0.5)
        await asyncio.sleep(1)
        place.opened.set()
        await until_empty()
    assert sorted(place.bodies) == ["1", "2", "3", "4"]
    [letter] = await outbox.dead_letters.list()
    assert letter.reason == "expired"


async def test_what_expires_while_it_is_sent_is_not_given_up(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    """It has no lease, and the clean-up of another process knows nothing of the claim."""
    place.held = "slow"
    async with outbox.running(relay=True):
        await emit("slow", expiration=0.5)
        async with asyncio.timeout(20):
            while "slow" not in place.asked:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert await outbox.store.maintenance.expire(100) == 0
        place.release()
        await place.until(1)
        await until_empty()
    assert await outbox.dead_letters.list() == []


async def test_what_expired_long_ago_is_given_up_although_no_relay_runs(outbox: Outbox, emit: Any) -> None:
    async with outbox.running(relay=True):
        pass  # from now on the messages come by the log
    await emit("old", "new", expiration=60)
    async with outbox.transaction() as session:
        table = outbox.tables.messages.fullname
        long_ago = f"UPDATE {table} SET expires_at = now() - interval '2 minutes' WHERE body = 'old'"
        await session.execute(text(long_ago))
    assert await outbox.store.maintenance.expire(100) == 1
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.message.body) == ("expired", b"old")


async def test_a_row_that_cannot_be_read_is_a_dead_letter_alone(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    table = outbox.tables.messages.fullname
    columns = "created_at, due_at, message_id, routing_key, content_type, headers, body"
    values = "now(), now(), 'x', 'order.created', 'text/plain', 'no json', 'x'"
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", b"before")
            await session.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({values})"))
            await outbox.emit(session, "order.created", b"after")
        assert await place.until(2) == ["before", "after"]
        await until_empty()
    [letter] = await outbox.dead_letters.list()
    assert letter.reason == "undecodable"


async def test_done_messages_are_kept_where_they_are_to_be(make: Make, outbox: Outbox, emit: Any, place: Place) -> None:
    relay = make(clean_up_after="NEVER")
    async with relay.running(relay=True):
        await emit("a", "b")
        await place.until(2)
        async with asyncio.timeout(10):
            while len(await outbox.messages(state="sent")) < 2:
                await asyncio.sleep(0.02)
    assert [each.attempt_count for each in await outbox.messages(state="sent")] == [1, 1]
    async with relay.running(relay=True):
        await emit("c")
        await place.until(3)
    assert place.bodies == ["a", "b", "c"]


async def test_a_destination_that_is_away_gets_everything_in_commit_order(
    outbox: Outbox, make: Make, emit: Any, place: Place, until_empty: Any
) -> None:
    relay = make(batch_size=10)
    place.opened.clear()
    async with relay.running(relay=True):
        for number in range(100):
            await emit(str(number))
        place.opened.set()
        assert await place.until(100) == [str(number) for number in range(100)]
        await until_empty()


async def test_a_relay_that_starts_again_sends_nothing_twice(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    for round in range(3):
        async with outbox.running(relay=True):
            await emit(f"{round} a", f"{round} b")
            await place.until(2 * round + 2)
            await until_empty()
    assert place.bodies == ["0 a", "0 b", "1 a", "1 b", "2 a", "2 b"]
