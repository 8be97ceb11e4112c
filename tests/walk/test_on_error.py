"""`on_error`: what it decides, and what it writes together with the end of the attempt."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import ConfigurationError, FailedAttempt, Message, Outbox, Reject, listen
from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.events import Conflicted, Handled, LeaseWasLost, Troubled
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch, reached


@pytest.fixture(params=[None, "memory://"], ids=["database", "memory"])
def transport(request: pytest.FixtureRequest) -> str | None:
    named: str | None = request.param
    return named


async def test_it_is_told_everything_after_the_failed_work_was_rolled_back(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    told: list[tuple[object, ...]] = []

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
        left = await session.scalar(text(f"SELECT count(*) FROM {effects.table.name} WHERE what = 'tried'"))
        told.append((type(error), message.routing_key, left, attempt.attempt_count, attempt.retry_in, attempt.is_last))

    @listen("#", queue="q", retry_delays=(0,), on_error=on_error)
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("tried"))
        raise OSError("away")

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        first, second = await watch.outcomes(2)
    assert told == [
        (OSError, "order.created", 0, 1, timedelta(0), False),
        (OSError, "order.created", 0, 2, None, True),
    ]
    assert isinstance(first, RetryIn)
    assert isinstance(second, Dead) and second.reason is Reason.EXHAUSTED
    [letter] = await outbox.dead_letters.list()
    assert letter.attempt_count == 2 and "OSError: away" in letter.error


async def test_permanent_makes_a_dead_letter_at_once_and_what_it_emits_is_sent(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    compensated: list[object] = []

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> str:
        await session.execute(effects.write("compensated"))
        await outbox.emit(session, "order.cancelled", {"id": 1})
        return "permanent"

    @listen("order.created", queue="q", on_error=on_error)  # type: ignore[arg-type]
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("tried"))
        raise ValueError("no such order")

    @listen("order.cancelled", queue="cancelled")
    async def cancelled(body: object) -> None:
        compensated.append(body)

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener, cancelled]):
        await watch.wait_for(Handled, 2)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == (Reason.REJECTED, 1)
    assert letter.error.startswith("ValueError: no such order")
    assert compensated == [{"id": 1}]
    assert await effects.all() == ["compensated"]


async def test_what_it_writes_commits_with_the_end_of_the_attempt_or_not_at_all(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    """Whoever lost the lease meanwhile compensates nothing: the message is somebody else's."""
    outbox = make_outbox(observers=[watch])
    takes: list[int] = []

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> str:
        await session.execute(effects.write(f"compensation {len(takes)}"))
        return "permanent"

    @listen("#", queue="q", on_error=on_error)  # type: ignore[arg-type]
    async def listener(body: int) -> None:
        takes.append(body)
        if len(takes) == 1:  # as another worker does whose claim found the lease expired
            async with outbox.transaction() as session:
                await session.execute(text(f"UPDATE {outbox.tables.messages.name} SET lease_until = NULL"))
        raise ValueError("wrong for ever")

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        async with asyncio.timeout(PATIENCE):
            while not await outbox.dead_letters.list():
                await asyncio.sleep(0.05)
    assert await effects.all() == ["compensation 2"]
    assert len(watch.of(LeaseWasLost)) == 1
    assert [event.outcome.in_transaction for event in watch.of(Handled)] == [True]


async def test_one_that_fails_itself_writes_nothing_and_leaves_the_decision_to_the_policy(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> Any:
        await session.execute(effects.write("never seen"))
        if attempt.attempt_count == 1:
            raise RuntimeError("on_error is broken")
        return True

    @listen("#", queue="q", retry_delays=(0, 0), on_error=on_error)
    async def listener(body: int, attempt_count: int) -> None:
        if attempt_count < 3:
            raise OSError("away")

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        first, second, third = await watch.outcomes(3)
    assert isinstance(first, RetryIn) and isinstance(second, RetryIn) and isinstance(third, Done)
    assert not first.in_transaction
    assert [type(event.error) for event in watch.of(Troubled)] == [RuntimeError, TypeError]
    assert '"transient", "permanent", or None' in str(watch.of(Troubled)[1].error)
    assert await effects.all() == []


async def test_it_cannot_prolong_what_is_over(make_outbox: MakeOutbox, watch: Watch, transport: str | None) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    last: dict[bytes, bool] = {}

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> str:
        last[message.body] = attempt.is_last
        return "transient"

    @listen("#", queue="q", retry_delays=(), on_error=on_error)  # type: ignore[arg-type]
    async def listener(body: int) -> None:
        raise Reject("never") if body == 1 else OSError("away")

    await emit(outbox, 1, 2, "no number")
    async with outbox.running(relay=True, listeners=[listener]):
        await watch.wait_for(Handled, 3)
    letters = {letter.message.body: letter.reason for letter in await outbox.dead_letters.list()}
    assert letters == {b"1": Reason.REJECTED, b"2": Reason.EXHAUSTED, b'"no number"': Reason.UNDECODABLE}
    assert last == {b"1": True, b"2": True}  # of a body that does not fit nobody is asked: no listener was called


async def test_a_plain_listener_has_a_plain_one(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    def on_error(error: BaseException, message: Message, session: Session, attempt: FailedAttempt) -> str:
        session.execute(effects.write("compensated"))
        return "permanent"

    @listen("#", queue="q", on_error=on_error)  # type: ignore[arg-type]
    def listener(body: int, session: Session) -> None:
        session.execute(effects.write("tried"))
        raise ValueError("wrong for ever")

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and outcome.reason is Reason.REJECTED
    assert await effects.all() == ["compensated"]


async def test_one_that_hangs_is_cut_like_a_listener(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
        await session.execute(effects.write("never seen"))
        await asyncio.sleep(3600)

    @listen("#", queue="q", retry_delays=(), timeout=1, on_error=on_error)
    async def listener(body: int) -> None:
        raise OSError("away")

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and outcome.reason is Reason.EXHAUSTED
    assert await effects.all() == []


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_its_own_transaction_is_run_again_when_it_collides(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    runs: list[int] = []

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> str:
        runs.append(1)
        await session.execute(effects.write(f"run {len(runs)}"))
        if len(runs) == 1:
            await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'collided' USING ERRCODE = '40001'; END $$"))
        return "permanent"

    @listen("#", queue="q", on_error=on_error)  # type: ignore[arg-type]
    async def listener(body: int) -> None:
        raise ValueError("wrong for ever")

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and outcome.reason is Reason.REJECTED
    assert await effects.all() == ["run 2"] and len(watch.of(Conflicted)) == 1


async def test_an_async_listener_with_a_plain_on_error_is_refused(outbox: Outbox) -> None:
    def on_error(error: BaseException, message: Message, session: Session, attempt: FailedAttempt) -> None: ...

    @listen("#", queue="q", on_error=on_error)
    async def listener(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="q: on_error and the listener are both `async def`, or neither is"):
        await outbox.worker([listener])


async def test_without_a_database_it_is_refused() -> None:
    async def on_error(
        error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt
    ) -> None: ...

    @listen("#", queue="q", on_error=on_error)
    async def listener(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="q asks for a session, but no database is set up"):
        await Outbox(transport="memory://").worker([listener])


@pytest.mark.parametrize("how", ["awaited", "in a thread", "in a thread that is late"])
async def test_one_that_commits_on_its_driver_is_not_asked_again(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, how: str
) -> None:
    """Its effects are committed, and another attempt that fails would repeat them."""
    outbox = make_outbox(transport=transport, observers=[watch])

    def commit(session: Session) -> None:
        session.execute(effects.write("compensated"))
        session.connection().connection.commit()

    async def awaited(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
        await session.run_sync(commit)

    def plain(error: BaseException, message: Message, session: Session, attempt: FailedAttempt) -> None:
        commit(session)
        if "late" in how:
            time.sleep(2)

    async def fails(body: int) -> None:
        raise OSError("away")

    def fails_plainly(body: int) -> None:
        raise OSError("away")

    options: dict[str, Any] = {"queue": "q", "retry_delays": (0, 0), "timeout": 1 if "late" in how else 30}
    if how == "awaited":
        listener = listen("#", on_error=awaited, **options)(fails)
    else:
        listener = listen("#", on_error=plain, **options)(fails_plainly)
    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [outcome] = await watch.outcomes(1)
        while not await outbox.dead_letters.list():
            await asyncio.sleep(0.05)
    assert isinstance(outcome, Dead) and outcome.reason is Reason.REJECTED
    assert "driver's own connection" in outcome.error and "OSError: away" in outcome.error
    assert await effects.all() == ["compensated"]


async def test_one_that_outlives_the_grace_is_abandoned_and_the_message_given_back(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch], grace=0.5)
    asked = asyncio.Event()

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
        await session.execute(effects.write("never seen"))
        asked.set()
        await asyncio.sleep(3600)

    @listen("#", queue="q", retry_delays=(), on_error=on_error)
    async def listener(body: int) -> None:
        raise OSError("away")

    @listen("#", queue="q")
    async def after(body: int) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        await reached(asked)
    async with outbox.running(relay=True, listeners=[after]):
        ended = await watch.wait_for(Handled)
        while not isinstance(ended[-1].outcome, Done):
            ended = await watch.wait_for(Handled, len(ended) + 1)
    assert ended[-1].attempt.attempt_count == 1, "an answer that never came burns no attempt"
    assert await effects.all() == []


async def test_of_a_list_it_is_asked_for_each_that_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    asked: dict[bytes, str] = {}

    async def on_error(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> Any:
        asked[message.body] = str(error)
        await session.execute(effects.write(f"refused {message.body.decode()}"))
        return "permanent"

    @listen("#", queue="q", batch=10, on_error=on_error)
    async def listener(numbers: list[int], session: AsyncSession) -> dict[int, Exception]:
        for number in numbers:
            await session.execute(effects.write(f"handled {number}"))
        if 4 in numbers:
            raise ValueError("raised")
        failed: dict[int, Exception] = {place: OSError("told") for place, number in enumerate(numbers) if number == 2}
        return failed

    await emit(outbox, 1, 2, 3, 4, "no number")
    async with outbox.running(relay=True, listeners=[listener]):
        await watch.wait_for(Handled, 5)
    assert asked == {b"2": "told", b"4": "raised"}
    letters = {letter.message.body: letter.reason for letter in await outbox.dead_letters.list()}
    assert letters == {b"2": Reason.REJECTED, b"4": Reason.REJECTED, b'"no number"': Reason.UNDECODABLE}
    # The listener itself would have to undo what it wrote for 2, which it only told of.
    assert sorted(await effects.all()) == ["handled 1", "handled 2", "handled 3", "refused 2", "refused 4"]
