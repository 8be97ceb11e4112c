"""What `outbox.testing` gives to the tests of an application, on every database and with the memory transport."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import (
    ConfigurationError,
    Message,
    Outbox,
    Reason,
    Reject,
    RetryPolicy,
    TimeInvalid,
    TransactionError,
    get_tracking_ids,
    listen,
)
from outbox.adapters import sync_url
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import Handled
from outbox.core.store import Selection
from outbox.core.transport import Features
from outbox.sqlite import prepare
from outbox.testing import Drained, Emission, NotDrained, advance, drain, emitted, emitted_sync
from outbox.transports.memory import MemoryTransport
from tests.support.databases import DATABASES, url_on
from tests.support.observing import Recorder
from tests.support.outboxes import MakeOutbox

MINUTE = timedelta(minutes=1)
QUICKLY = 30.0  # seconds, on a machine that may stall: less than any delay, and than any wait for a database


class Order(BaseModel):
    id: int
    total: int = 0


IN_MEMORY = "sqlite in memory"
QUEUES_IN_MEMORY = "sqlite, and queues in memory"


@pytest.fixture(params=[*DATABASES, IN_MEMORY, QUEUES_IN_MEMORY])
def kind(request: pytest.FixtureRequest) -> str:
    """Every database and driver with its own queues, and the memory transport on one of them."""
    found: str = request.param
    return found


@pytest.fixture
def database_url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == IN_MEMORY:
        return "sqlite+aiosqlite://"
    return url_on(request, "sqlite" if kind == QUEUES_IN_MEMORY else kind, tmp_path)


@pytest.fixture
def outbox(kind: str, make_outbox: MakeOutbox) -> Outbox:
    return make_outbox(transport=MemoryTransport() if kind == QUEUES_IN_MEMORY else None)


class Calls:
    """A listener that remembers its calls and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.bodies: list[Any] = []
        self._failures = failures

    async def __call__(self, body: Any) -> None:
        self.bodies.append(body)
        if len(self.bodies) <= self._failures:
            raise ValueError(f"failure {len(self.bodies)}")


async def emit(outbox: Outbox, routing_key: str, body: object, **options: Any) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, routing_key, body, **options)


# What a transaction has emitted.


async def test_a_test_sees_what_a_transaction_has_emitted_before_it_commits(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        assert await emitted(session) == []
        await outbox.emit(session, "order.created", Order(id=1, total=5), key="customer-7", headers={"trace": "abc"})
        await outbox.emit_many(session, "mail.sent", ["a", "b"])
        assert await emitted(session) == [
            Emission("order.created", {"id": 1, "total": 5}, key="customer-7", headers={"trace": "abc"}),
            Emission("mail.sent", "a"),
            Emission("mail.sent", "b"),
        ]
    assert await emitted(session) == []


async def test_an_emission_says_when_the_message_is_due_in_one_spelling(outbox: Outbox) -> None:
    noon = datetime(2100, 1, 1, 12, tzinfo=UTC)
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 1, eta=60_000, expiration=30)
        await outbox.emit(session, "b", 2, eta=noon)
        await outbox.emit(session, "c", 3, eta=timedelta(hours=1), timer_id="t")
        assert await outbox.emit(session, "c", 4, eta=timedelta(hours=2), timer_id="t") is None
        assert await emitted(session) == [
            Emission("a", 1, eta=MINUTE, expiration=timedelta(seconds=30)),
            Emission("b", 2, eta=noon),
            Emission("c", 3, eta=timedelta(hours=1), timer_id="t"),
        ]
        await outbox.cancel_timer(session, "t")
        assert [each.routing_key for each in await emitted(session)] == ["a", "b"]


def test_emissions_are_compared_by_what_a_listener_would_get() -> None:
    assert Emission("a", Order(id=1)) == Emission("a", {"id": 1, "total": 0})
    assert Emission("a", (1, 2), eta=1000) == Emission("a", [1, 2], eta=timedelta(seconds=1))
    assert Emission("a", b"\xff") != Emission("a", "ÿ")
    assert Emission("a", b'{"id": 1}') != Emission("a", {"id": 1}), "one says that it is JSON"
    assert Emission("a", 1) != Emission("b", 1)
    assert Emission("a", 1) != Emission("a", 1, key="k")
    assert Emission("a", 1, eta=0) == Emission("a", 1)


async def test_an_emission_holds_the_message_that_listeners_will_get(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        message = await outbox.emit(session, "order.created", {"id": 1})
        [emission] = await emitted(session)
    assert message is not None and emission.message is not None
    assert (emission.message.id, emission.message.body) == (message.id, message.body)


async def test_only_the_transactions_own_messages_are_seen(outbox: Outbox) -> None:
    await emit(outbox, "earlier", 1)
    async with outbox.transaction() as session:
        assert await emitted(session) == []
        await outbox.emit(session, "now", 2)
        assert await emitted(session) == [Emission("now", 2)]


async def test_what_was_rolled_back_was_not_emitted(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "stays", 1)
        try:
            async with session.begin_nested():
                await outbox.emit(session, "goes", 2)
                assert await emitted(session) == [Emission("stays", 1), Emission("goes", 2)]
                raise LookupError
        except LookupError:
            pass
        assert await emitted(session) == [Emission("stays", 1)]
        await session.rollback()
        assert await emitted(session) == []


async def test_many_messages_are_seen_in_their_order(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "n", range(1200))
        assert [each.body for each in await emitted(session)] == list(range(1200))


async def test_looking_at_what_was_emitted_flushes_nothing(outbox: Outbox) -> None:
    class Base(DeclarativeBase):
        pass

    class Thing(Base):
        __tablename__ = "no_such_table"
        id: Mapped[int] = mapped_column(primary_key=True)

    async with outbox.transaction() as session:
        session.add(Thing(id=1))
        await outbox.emit(session, "a", 1)
        assert await emitted(session) == [Emission("a", 1)]
        assert len(session.new) == 1
        session.expunge_all()


def test_sessions_and_connections_without_an_event_loop_are_looked_into_as_well(
    database_url: str, table_name: str
) -> None:
    engine = create_engine(sync_url(make_url(database_url)))
    outbox = Outbox(db_engine=engine, table_name=table_name)
    with Session(engine) as session:
        assert emitted_sync(session) == []
        outbox.emit_sync(session, "a", 1)
        assert emitted_sync(session) == emitted_sync(session.connection()) == [Emission("a", 1)]
        session.rollback()
        assert emitted_sync(session) == []
    with engine.connect() as connection:
        outbox.emit_many_sync(connection, "b", [1, 2])
        assert emitted_sync(connection) == [Emission("b", 1), Emission("b", 2)]
        connection.rollback()
    engine.dispose()


async def test_a_session_that_a_test_joins_into_its_own_transaction_may_commit(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        prepare(engine)
    outbox = make_outbox(db_engine=engine)
    async with engine.connect() as connection:
        whole = await connection.begin()
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            await outbox.emit(session, "order.created", 1)
            await session.commit()
            assert await emitted(session) == await emitted(connection) == [Emission("order.created", 1)]
        await whole.rollback()
        assert await emitted(connection) == []
    await outbox.close()
    await engine.dispose()


async def test_what_is_no_session_is_refused(outbox: Outbox) -> None:
    with pytest.raises(TransactionError, match="pass the AsyncSession"):
        await emitted("session")  # type: ignore[arg-type]
    async with outbox.transaction() as session:
        with pytest.raises(TransactionError, match="needs the event loop"):
            emitted_sync(session)  # type: ignore[arg-type]


# Draining.


async def test_listeners_are_called_until_nothing_is_left(outbox: Outbox) -> None:
    heard: list[tuple[str, int]] = []

    @listen("order.created", queue="billing")
    async def billing(body: int, session: AsyncSession) -> None:
        heard.append(("billing", body))
        await outbox.emit(session, "invoice.written", body)

    @listen("invoice.*", queue="mail", concurrency=1)
    async def mail(body: int) -> None:
        heard.append(("mail", body))

    @listen("#", queue="audit")
    def audit(body: int, routing_key: str) -> None:
        heard.append((routing_key, body))

    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", [1, 2])

    assert await drain(outbox, [billing, mail, audit]) == Drained(handled=8)
    assert [body for what, body in heard if what == "mail"] == [1, 2]
    assert sorted(heard) == sorted(
        (what, body) for body in (1, 2) for what in ("billing", "mail", "order.created", "invoice.written")
    )
    assert await drain(outbox, [billing, mail, audit]) == Drained()


async def test_a_retry_after_five_minutes_takes_no_time(outbox: Outbox) -> None:
    calls = Calls(failures=2)
    await emit(outbox, "order.created", 1)
    began = time.monotonic()

    drained = await drain(outbox, [listen("order.*", queue="q", retry_delays=(300, 300))(calls)])

    assert drained == Drained(handled=1, retried=2)
    assert time.monotonic() - began < QUICKLY
    assert 9 * MINUTE < drained.passed < 11 * MINUTE, "what really passed need not be made up for"
    assert calls.bodies == [1, 1, 1]
    assert [type(each.outcome) for each in drained.attempts] == [RetryIn, RetryIn, Done]
    assert [each.attempt.attempt_count for each in drained.attempts] == [1, 2, 3]
    assert [str(error) for error in drained.errors] == ["failure 1", "failure 2"]


async def test_a_listener_that_always_fails_ends_in_a_dead_letter_at_once(outbox: Outbox) -> None:
    began = time.monotonic()
    await emit(outbox, "order.created", {"id": 1})

    drained = await drain(outbox, [listen("order.*", queue="q")(Calls(failures=99))])

    assert time.monotonic() - began < QUICKLY
    assert drained == Drained(retried=4, dead=1)
    assert "ValueError('failure 5')" in repr(drained)
    [letter] = drained.dead_letters
    assert (letter.reason, letter.queue, letter.attempt_count) == (Reason.EXHAUSTED, "q", 5)
    assert [each.id for each in await outbox.dead_letters.list()] == [letter.id]
    await outbox.dead_letters.replay([letter.id])
    assert await drain(outbox, [listen("order.*", queue="q", retry_delays=())(Calls(1))]) == Drained(dead=1)


async def test_what_a_listener_rejects_or_cannot_decode_is_dead_and_told(outbox: Outbox) -> None:
    @listen("a", queue="a")
    async def reject(body: int) -> None:
        raise Reject("not this one")

    @listen("b", queue="b")
    async def decode(order: Order) -> None:
        raise AssertionError("it is not reached")

    await emit(outbox, "a", 1)
    await emit(outbox, "b", "no order")
    drained = await drain(outbox, [reject, decode])
    assert drained == Drained(dead=2)
    assert [type(error).__name__ for error in drained.errors] == ["Reject", "Undecodable"]
    assert [letter.reason for letter in drained.dead_letters] == [Reason.REJECTED, Reason.UNDECODABLE]


async def test_the_first_error_is_raised_if_that_is_wanted_and_the_message_stays(outbox: Outbox) -> None:
    listener = listen("#", queue="q", retry_delays=(300,))(Calls(failures=1))
    await emit(outbox, "order.created", 1)
    with pytest.raises(ValueError, match="failure 1"):
        await drain(outbox, [listener], raise_errors=True)
    assert await drain(outbox, [listener], raise_errors=True) == Drained(handled=1)


async def test_messages_that_are_due_later_are_delivered_too(outbox: Outbox) -> None:
    calls = Calls()
    await emit(outbox, "later", "a year", eta=timedelta(days=365))
    await emit(outbox, "later", "a day", eta=timedelta(days=1), timer_id="t")
    await emit(outbox, "later", "now")
    drained = await drain(outbox, [listen("later", queue="q")(calls)])
    assert drained == Drained(handled=3)
    assert calls.bodies == ["now", "a day", "a year"]
    assert timedelta(days=364) < drained.passed < timedelta(days=366)


async def test_the_clock_is_moved_no_further_than_a_test_allows(outbox: Outbox) -> None:
    calls = Calls()
    listener = listen("later", queue="q")(calls)
    await emit(outbox, "later", "a minute", eta=MINUTE)
    await emit(outbox, "later", "an hour", eta=60 * MINUTE)
    assert await drain(outbox, [listener], ahead=0) == Drained(left=2)
    assert await drain(outbox, [listener], ahead=5 * MINUTE) == Drained(handled=1, left=1)
    await advance(outbox, 60 * MINUTE)
    assert await drain(outbox, [listener], ahead=0) == Drained(handled=1)
    assert calls.bodies == ["a minute", "an hour"]


async def test_a_message_that_expires_before_its_retry_is_dead(outbox: Outbox) -> None:
    await emit(outbox, "order.created", 1, expiration=MINUTE)
    drained = await drain(outbox, [listen("#", queue="q", retry_delays=(300,))(Calls(failures=1))])
    assert drained == Drained(retried=1, dead=1)
    assert [letter.reason for letter in drained.dead_letters] == [Reason.EXPIRED]


async def test_a_message_without_a_queue_is_counted_and_waits_for_one(outbox: Outbox) -> None:
    calls = Calls()
    await emit(outbox, "order.created", 1)
    await emit(outbox, "user.created", 2)
    orders, users = listen("order.*", queue="orders", retry_delays=(300,))(Calls(1)), listen("user.*")(calls)
    assert await drain(outbox, [orders]) == Drained(handled=1, retried=1, unroutable=1)
    assert await drain(outbox, [orders, users]) == Drained(handled=1)
    assert calls.bodies == [2]


async def test_queues_of_other_listeners_are_left_alone(outbox: Outbox) -> None:
    mine, other = listen("#", queue="mine")(Calls()), listen("#", queue="other")(Calls())
    assert await drain(outbox, [mine, other]) == Drained()
    await emit(outbox, "order.created", 1)
    assert await drain(outbox, [mine]) == Drained(handled=1, left=1)
    assert await drain(outbox, [other]) == Drained(handled=1)


@pytest.mark.parametrize("delay", [0, 60])
async def test_a_listener_that_is_tried_for_ever_is_given_up_by_name(outbox: Outbox, delay: int) -> None:
    listener = listen("order.*", queue="q", retry_delays=RetryPolicy.constant(delay))(Calls(failures=10**9))
    await emit(outbox, "order.created", 1)
    with pytest.raises(NotDrained, match=r"9 attempts .* 9 of them were for 'order.created' in 'q'") as raised:
        await drain(outbox, [listener], at_most=9)
    assert raised.value.drained == Drained(retried=9)


async def test_listeners_that_keep_each_other_busy_are_given_up(outbox: Outbox) -> None:
    async def answer(body: int, session: AsyncSession, routing_key: str) -> None:
        await outbox.emit(session, "pong" if routing_key == "ping" else "ping", body + 1)

    await emit(outbox, "ping", 0)
    with pytest.raises(NotDrained, match="9 attempts were made and there is more to do") as raised:
        await drain(outbox, [listen("ping", queue="a")(answer), listen("pong", queue="b")(answer)], at_most=9)
    assert raised.value.drained == Drained(handled=9)


async def test_centuries_may_pass_and_older_messages_are_still_found(outbox: Outbox) -> None:
    old, never = Calls(), RetryPolicy.exponential(timedelta(days=36_500), 10)
    await drain(outbox, [listen("old", queue="old")(old)])
    await emit(outbox, "old", 1)
    await emit(outbox, "new", 2)
    with pytest.raises(NotDrained, match="5 attempts were made"):
        await drain(outbox, [listen("new", queue="new", retry_delays=never)(Calls(failures=10**9))], at_most=5)
    assert await drain(outbox, [listen("old", queue="old")(old)], ahead=0) == Drained(handled=1, left=1)


@pytest.mark.parametrize("kind", ["sqlite", IN_MEMORY, QUEUES_IN_MEMORY])
async def test_a_listener_that_never_ends_is_given_up_and_its_message_stays(outbox: Outbox) -> None:
    stuck = True

    @listen("#", queue="q")
    async def wait(body: int, session: AsyncSession) -> None:
        if stuck:
            await asyncio.Event().wait()

    await emit(outbox, "order.created", 1)
    with pytest.raises(NotDrained, match="the listener of 'q' did not end within 2 s"):
        await drain(outbox, [wait], within=2)
    stuck = False
    assert await drain(outbox, [wait]) == Drained(handled=1)


async def test_a_listeners_session_commits_with_the_end_of_its_message(outbox: Outbox, table_name: str) -> None:
    effects = Table(f"{table_name}_effects", MetaData(), Column("number", Integer))
    async with outbox.transaction() as session:
        await (await session.connection()).run_sync(effects.metadata.create_all)
    failures = Calls(failures=1)

    @listen("#", queue="q")
    async def write(body: int, session: AsyncSession) -> None:
        await session.execute(insert(effects).values(number=body))
        await failures(body)

    await emit(outbox, "order.created", 7)
    assert await drain(outbox, [write]) == Drained(handled=1, retried=1)
    async with outbox.transaction() as session:
        assert list(await session.scalars(select(effects.c.number))) == [7]


async def test_what_a_listener_emits_follows_from_its_message(outbox: Outbox) -> None:
    seen: dict[str, tuple[str, ...]] = {}

    @listen("#", queue="q")
    async def follow(body: int, session: AsyncSession, routing_key: str) -> None:
        seen[routing_key] = get_tracking_ids()
        if routing_key == "first":
            await outbox.emit(session, "second", body)

    await emit(outbox, "first", 1)
    await drain(outbox, [follow])
    assert seen["second"][:-1] == seen["first"]
    assert get_tracking_ids() == ()


async def test_the_outboxs_own_observers_hear_of_everything(make_outbox: MakeOutbox) -> None:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    await emit(outbox, "order.created", 1)
    drained = await drain(outbox, [listen("#", queue="q")(Calls())])
    assert tuple(recorder.of(Handled)) == drained.attempts
    await emit(outbox, "order.created", 1)
    async with outbox.running(listeners=[listen("#", queue="q")(Calls())]):
        await recorder.wait_for(Handled, 2)
    assert len(drained.attempts) == 1


async def test_what_is_not_committed_yet_cannot_be_drained(outbox: Outbox) -> None:
    began = time.monotonic()
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", 1)
        if session.get_bind().dialect.name == "sqlite":
            for work in (drain(outbox), advance(outbox, MINUTE)):
                with pytest.raises(TransactionError, match="a transaction is open in this task already"):
                    await work
        else:
            assert await drain(outbox, [listen("#", queue="q")(Calls())]) == Drained()
    assert time.monotonic() - began < QUICKLY


async def test_a_transport_that_only_publishes_gets_everything(make_outbox: MakeOutbox) -> None:
    sent: list[Message] = []

    async def publish(message: Message) -> None:
        sent.append(message)
        if len(sent) == 1:
            raise ConnectionError("not now")

    outbox = make_outbox(transport=publish, relay_retry_delays=(300,))
    await emit(outbox, "order.created", 1)
    await emit(outbox, "order.created", 2, eta=60 * MINUTE)
    assert await drain(outbox) == Drained(sent=2)
    assert [message.body for message in sent] == [b"1", b"1", b"2"]


async def test_a_transport_that_refuses_a_message_for_good_leaves_a_dead_letter(make_outbox: MakeOutbox) -> None:
    async def refuse(message: Message) -> None:
        raise ValueError("never")

    outbox = make_outbox(transport=refuse, relay_retry_delays=(300, 300))
    await emit(outbox, "order.created", 1)
    drained = await drain(outbox)
    assert drained == Drained(dead=1)
    assert "never" in drained.dead_letters[0].error


async def test_a_transport_that_refuses_for_ever_is_given_up(make_outbox: MakeOutbox) -> None:
    async def refuse(message: Message) -> None:
        raise ValueError("never")

    outbox = make_outbox(transport=refuse)
    await emit(outbox, "order.created", 1)
    with pytest.raises(NotDrained, match="10 attempts were made and there is more to do; no listener was called"):
        await drain(outbox, at_most=10)


async def test_a_broker_has_a_clock_that_nobody_can_move(make_outbox: MakeOutbox) -> None:
    class Broker(MemoryTransport):
        name = "broker"
        features = Features()

    transport: Any = Broker()
    transport.open = transport.close = transport.publish = transport.declare = transport.consume = None
    outbox = make_outbox(transport=transport)
    with pytest.raises(ConfigurationError, match="'broker' has its own clock, which cannot be moved"):
        await drain(outbox)


def test_an_outbox_can_be_drained_in_one_event_loop_after_another(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)

    async def test() -> Drained:
        await emit(outbox, "order.created", 1)
        drained = await drain(outbox, [listen("#", queue="q", retry_delays=(300,))(Calls(1))])
        await outbox.close()
        return drained

    assert [asyncio.run(test()) for _ in range(2)] == [Drained(handled=1, retried=1)] * 2


async def test_a_worker_without_a_database_is_drained_as_well() -> None:
    transport, calls = MemoryTransport(), Calls(failures=1)
    outbox = Outbox(transport=transport)
    listener = listen("#", queue="q", retry_delays=(300,))(calls)
    await transport.declare([listener])
    await transport.publish([Message(routing_key="order.created", body=b"1")])
    assert await drain(outbox, [listener]) == Drained(handled=1, retried=1)


# The clock.


async def test_everything_that_is_kept_becomes_older(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(clean_up_after=timedelta(days=1))
    await emit(outbox, "waits", 1, eta=60 * MINUTE, expiration=MINUTE)
    await emit(outbox, "done", 2)
    await emit(outbox, "dead", 3)
    await drain(
        outbox, [listen("done", queue="q")(Calls()), listen("dead", queue="d", retry_delays=())(Calls(1))], ahead=0
    )
    before, dead_before = await outbox.messages(), await outbox.dead_letters.list()

    await advance(outbox, timedelta(hours=10))

    after, dead_after = await outbox.messages(), await outbox.dead_letters.list()
    assert [each.state for each in after] == ["waiting", "handled"]
    for was, now in zip(before, after, strict=True):
        for name in ("due_at", "routed_at", "done_at"):
            _is_older(getattr(was, name), getattr(now, name))
        for name in ("created_at", "expires_at"):
            _is_older(getattr(was.message, name), getattr(now.message, name))
    _is_older(dead_before[0].died_at, dead_after[0].died_at)
    await advance(outbox, timedelta(hours=15))
    assert await drain(outbox) == Drained(dead=1), "what waits has expired"
    assert await outbox.messages() == [], "and what was done is cleaned up"


def _is_older(was: datetime | None, now: datetime | None) -> None:
    assert (was is None) == (now is None)
    if was is not None and now is not None:
        assert abs(was - now - timedelta(hours=10)) < timedelta(milliseconds=2)


async def test_the_lease_of_a_worker_that_died_runs_out(make_outbox: MakeOutbox) -> None:
    outbox, calls = make_outbox(), Calls()
    listener = listen("#", queue="q")(calls)
    await drain(outbox, [listener])
    await emit(outbox, "order.created", 1)
    await outbox.store.queues.route(1, {})
    async with outbox.store.feed.claim(Selection(limit=1, lease=10 * MINUTE, destination="q")) as claim:
        assert len(claim.attempts) == 1
        assert await drain(outbox, [listener]) == Drained(left=1)
        await advance(outbox, 10 * MINUTE)
        assert await drain(outbox, [listener]) == Drained(handled=1)
    assert calls.bodies == [1]


async def test_a_message_is_handled_once_even_if_its_copy_comes_a_day_later(make_outbox: MakeOutbox) -> None:
    transport, calls = MemoryTransport(), Calls()
    outbox = make_outbox(transport=transport)

    @listen("#", queue="q")
    async def once(body: int, session: AsyncSession) -> None:
        await calls(body)

    await emit(outbox, "order.created", 1)
    assert await drain(outbox, [once]) == Drained(handled=1)
    await advance(outbox, timedelta(days=1))
    await transport.publish(transport.published)
    assert await drain(outbox, [once]) == Drained(handled=1)
    assert calls.bodies == [1]
    await advance(outbox, timedelta(days=30))
    await drain(outbox)
    await transport.publish(transport.published[:1])
    await drain(outbox, [once])
    assert calls.bodies == [1, 1], "after thirty days the inbox has forgotten"


async def test_a_running_worker_is_woken_by_the_clock(make_outbox: MakeOutbox, outbox: Outbox) -> None:
    again = asyncio.Event()
    calls: list[int] = []

    @listen("#", queue="q", retry_delays=(300,))
    async def fail_once(attempt_count: int, body: int) -> None:
        calls.append(attempt_count)
        if attempt_count == 1:
            raise ValueError
        again.set()

    recorder = Recorder()
    with outbox._parts.observe.joined_by(recorder):
        async with outbox.running(relay=True, listeners=[fail_once]):
            await emit(outbox, "order.created", 1)
            await recorder.wait_for(Handled)
            await advance(outbox, 5 * MINUTE)
            async with asyncio.timeout(15):
                await again.wait()
    assert calls == [1, 2]


async def test_time_does_not_run_backwards(outbox: Outbox) -> None:
    with pytest.raises(TimeInvalid, match="by is negative"):
        await advance(outbox, -1)
