"""What `drain` hands to listeners is what a worker hands to them: the same deliveries, which end in the same ways."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import FailedAttempt, Listener, Message, Outbox, Reason, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled, LeaseWasLost
from outbox.testing import Drained, drain
from outbox.testing.sources import StoreSource
from outbox.testing.sql import sql_store
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch


async def test_on_error_commits_together_with_the_end_of_the_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(observers=[watch])

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
        await session.execute(effects.write(f"failure {attempt.attempt_count}"))

    @listen("#", queue="q", retry_delays=(60,), on_error=on_error)
    async def listener(body: int) -> None:
        raise OSError("away")

    await emit(outbox, 1)
    assert await drain(outbox, [listener]) == Drained(retried=1, dead=1)
    assert await effects.all() == ["failure 1", "failure 2"]
    assert [event.outcome.in_transaction for event in watch.of(Handled)] == [True, True]
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == (Reason.EXHAUSTED, 2)


async def test_on_error_writes_nothing_once_the_lease_is_lost(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(observers=[watch])
    calls: list[int] = []

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> str:
        await session.execute(effects.write(f"compensation {len(calls)}"))
        return "permanent"

    @listen("#", queue="q", on_error=on_error)  # type: ignore[arg-type]
    async def listener(body: int) -> None:
        calls.append(body)
        if len(calls) == 1:  # as another worker does whose claim found the lease expired
            async with outbox.transaction() as session:
                await session.execute(text(f"UPDATE {outbox.tables.messages.name} SET lease_until = NULL"))
        raise ValueError("wrong for ever")

    await emit(outbox, 1)
    drained = await drain(outbox, [listener])
    assert (drained.dead, drained.left) == (1, 0)
    assert await effects.all() == ["compensation 2"]
    assert len(watch.of(LeaseWasLost)) == 1


async def test_a_second_outcome_changes_nothing(outbox: Outbox, listener: Listener) -> None:
    await drain(outbox, [listener])  # binds its queue
    await emit(outbox, "an order")
    await drain(
        outbox, [Listener("nothing", lambda body: None, queue="another")]
    )  # routes the message, and handles it not
    async with StoreSource(sql_store(outbox.store)).taken(listener) as delivery:
        assert delivery is not None
        first = delivery.settle(RetryIn(timedelta(hours=1), "not now"))
        second = delivery.settle(Done())
        assert second.cancelled() and not first.done()
    assert first.result()
    [found] = await outbox.messages()
    assert found.state == "retrying"


async def test_each_message_of_a_list_has_an_outcome_of_its_own(outbox: Outbox) -> None:
    lists: list[list[int]] = []

    @listen("#", queue="q", batch=3, retry_delays=())
    async def listener(bodies: list[int]) -> None:
        lists.append(bodies)
        if 2 in bodies:
            raise ValueError("two of them")

    await emit(outbox, 1, 2, 3, 4)
    drained = await drain(outbox, [listener])
    assert [type(each.outcome) for each in drained.attempts] == [Done, Dead, Done, Done]
    assert (drained.handled, drained.dead, drained.left) == (3, 1, 0)
    assert lists == [[1, 2, 3], [1], [2], [3], [4]]
