"""Nothing counts as handled that the database did not commit, whatever a listener does to its transaction."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, registry, scoped_session, sessionmaker

from outbox import ConfigurationError, Listener, Outbox, Reason, TransactionError, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Handled, Troubled
from tests.support.broker import VirtualHost
from tests.support.databases import on_asyncpg
from tests.support.observing import Statements, eventually
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch

MEMORY = "memory://"


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str | None:
    """As the test is parametrized: None is the database."""
    named: str | None = request.param
    return named


def on(*ways: tuple[str, str | None]) -> pytest.MarkDecorator:
    """Databases with transports: as few as show every difference."""
    names = [f"{database}-{transport or 'database'}" for database, transport in ways]
    return pytest.mark.parametrize(("database_url", "transport"), ways, indirect=True, ids=names)


async def ends(outbox: Outbox, watch: Watch, listeners: list[Listener], count: int) -> dict[str, list[Any]]:
    """How the attempts of one message ended, queue by queue."""
    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=listeners):
        await watch.wait_for(Handled, count)
    found: dict[str, list[Any]] = {listener.queue: [] for listener in listeners}
    for event in watch.of(Handled):
        found[event.queue].append(event.outcome)
    return found


def swallowing(effects: Effects, **options: Any) -> list[Listener]:
    """Listeners that catch a database error and return."""

    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("in loop"))
        with pytest.raises(DBAPIError):
            await session.execute(text("SELECT 1 / 0"))

    def in_thread(body: int, session: Session) -> None:
        session.execute(effects.write("in thread"))
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1 / 0"))

    async def in_lists(bodies: list[int], session: AsyncSession) -> None:
        await session.execute(effects.write("in lists"))
        with pytest.raises(DBAPIError):
            await session.execute(text("SELECT 1 / 0"))

    return [
        listen("#", queue="loop", **options)(in_loop),
        listen("#", queue="thread", **options)(in_thread),
        listen("#", queue="lists", batch=10, **options)(in_lists),
    ]


@on(("postgresql+asyncpg", MEMORY), ("postgresql+psycopg", MEMORY), ("postgresql+asyncpg", None))
async def test_a_listener_that_swallows_a_database_error_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    outcomes = await ends(outbox, watch, swallowing(effects, retry_delays=(0,)), 6)
    for ended in outcomes.values():
        first, last = ended
        assert isinstance(first, RetryIn) and isinstance(last, Dead), ended
        assert "begin_nested" in last.error and "division by zero" in last.error, last.error
    assert await effects.all() == []
    assert {letter.queue for letter in await outbox.dead_letters.list()} == set(outcomes)


@on_asyncpg
async def test_a_swallowed_database_error_is_not_acknowledged_to_rabbitmq(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, vhost: VirtualHost
) -> None:
    outbox = make_outbox(rabbitmq_url=vhost.url, observers=[watch])
    outcomes = await ends(outbox, watch, swallowing(effects, retry_delays=()), 3)
    assert all(isinstance(ended[0], Dead) for ended in outcomes.values()), outcomes
    assert await effects.all() == []
    assert len(await outbox.dead_letters.list()) == 3


@on(("postgresql+asyncpg", MEMORY), ("sqlite", None))
async def test_an_error_in_a_savepoint_of_its_own_harms_nothing(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    @listen("#", queue="loop", retry_delays=())
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("before"))
        with pytest.raises(DBAPIError):
            async with session.begin_nested():
                await session.execute(text("SELECT nothing FROM nowhere"))
        await session.execute(effects.write("after"))

    outcomes = await ends(outbox, watch, [in_loop], 1)
    assert isinstance(outcomes["loop"][0], Done), outcomes
    assert await effects.all() == ["before", "after"]


@on(("postgresql+psycopg", MEMORY), ("sqlite", MEMORY))
async def test_a_failed_flush_that_is_swallowed_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """SQLAlchemy answers it by a rollback of the whole transaction, on every database."""
    outbox = make_outbox(transport=transport, observers=[watch])
    kind = type("Effect", (), {})
    registry().map_imperatively(kind, effects.table)

    @listen("#", queue="loop", retry_delays=())
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("before"))
        first, second = kind(), kind()
        first.id = second.id = 4711
        session.add(first)
        await session.flush()
        session.expunge(first)
        session.add(second)
        with pytest.raises(IntegrityError):
            await session.flush()

    outcomes = await ends(outbox, watch, [in_loop], 1)
    assert isinstance(outcomes["loop"][0], Dead) and outcomes["loop"][0].reason is Reason.EXHAUSTED
    assert await effects.all() == []


@on(("sqlite", MEMORY), ("sqlite", None))
async def test_a_listener_that_swallows_a_rollback_of_sqlite_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    name = effects.table.name
    raising = f"BEFORE INSERT ON {name} WHEN NEW.n = 13 BEGIN SELECT RAISE(ROLLBACK, 'full'); END"
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TRIGGER {name}_full {raising}"))

    @listen("#", queue="loop", retry_delays=())
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("loop"))
        with pytest.raises(DBAPIError, match="full"):
            await session.execute(effects.write("none", 13))

    @listen("#", queue="thread", retry_delays=())
    def in_thread(body: int, session: Session) -> None:
        session.execute(effects.write("thread"))
        with pytest.raises(DBAPIError, match="full"):
            session.execute(effects.write("none", 13))

    outcomes = await ends(outbox, watch, [in_loop, in_thread], 2)
    assert all(isinstance(ended[0], Dead) for ended in outcomes.values()), outcomes
    assert await effects.all() == []
    assert {letter.queue for letter in await outbox.dead_letters.list()} == {"loop", "thread"}


@on(("postgresql+asyncpg", MEMORY), ("postgresql+psycopg", MEMORY))
async def test_an_error_on_the_drivers_own_connection_that_is_swallowed_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    @listen("#", queue="loop", retry_delays=())
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("in loop"))
        pooled = await (await session.connection()).get_raw_connection()
        with pytest.raises(Exception, match="division by zero"):
            await pooled.driver_connection.execute("SELECT 1 / 0")  # type: ignore[union-attr]

    outcomes = await ends(outbox, watch, [in_loop], 1)
    assert "on the driver's own connection" in outcomes["loop"][0].error
    assert await effects.all() == []


@on_asyncpg
async def test_a_listener_of_which_no_statement_failed_costs_no_further_one(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(transport=MEMORY, observers=[watch])
    await emit(outbox, 2)

    @listen("#", queue="loop", retry_delays=())
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.table.insert(), [{"what": "one"}, {"what": "two"}])
        async with session.begin_nested():
            await session.execute(effects.write("nested"))
        assert len((await session.scalars(text(f"SELECT what FROM {effects.table.name}"))).all()) % 3 == 0

    with Statements(outbox.engines.asynchronous.sync_engine) as statements:
        outcomes = await ends(outbox, watch, [in_loop], 2)
    assert all(isinstance(outcome, Done) for outcome in outcomes["loop"])
    assert [each for each in statements if each.startswith("SELECT") and "what" not in each] == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_transaction_that_a_savepoint_would_commit_is_refused(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str
) -> None:
    """With the database as transport the listener's statement is the first."""
    outbox = make_outbox(observers=[watch])
    engine = create_async_engine(database_url)

    @listen("#", queue="q", retry_delays=(), session_factory=async_sessionmaker(engine))
    async def listener(body: int, session: AsyncSession) -> None:
        async with session.begin_nested():
            await session.execute(effects.write("released"))

    outcomes = await ends(outbox, watch, [listener], 1)
    await engine.dispose()
    assert "outbox.sqlite.prepare" in outcomes["q"][0].error
    assert await effects.all() == []


# Ending the transaction.

ASYNC_ENDS: dict[str, Callable[[AsyncSession], Any]] = {
    "session.close": lambda session: session.close(),
    "session.reset": lambda session: session.reset(),
    "session.invalidate": lambda session: session.invalidate(),
    "with session": lambda session: _enter(session),
    "connection.commit": lambda session: _of_connection(session, "commit"),
    "connection.rollback": lambda session: _of_connection(session, "rollback"),
    "connection.close": lambda session: _of_connection(session, "close"),
    "COMMIT": lambda session: session.execute(text("COMMIT")),
    "rollback": lambda session: session.execute(text(" rollback;")),
    "END": lambda session: session.execute(text("/* done */ END")),
    "BEGIN": lambda session: session.execute(text("-- anew\nBEGIN")),
}
TEXTS = ("COMMIT", "rollback", "END", "BEGIN")
PLAIN_ENDS: dict[str, Callable[[Session], Any]] = {
    "session.close": lambda session: session.close(),
    "with session": lambda session: session.__enter__().__exit__(None, None, None),
    "connection.commit": lambda session: session.connection().commit(),
    "connection.close": lambda session: session.connection().close(),
    "COMMIT": lambda session: session.connection().exec_driver_sql("COMMIT"),
}


async def _enter(session: AsyncSession) -> None:
    async with session:
        pass


async def _of_connection(session: AsyncSession, name: str) -> None:
    await getattr(await session.connection(), name)()


@pytest.mark.parametrize("swallows", [False, True], ids=["raises", "swallows"])
@on(("postgresql+asyncpg", MEMORY), ("sqlite", None))
async def test_whatever_would_end_the_transaction_is_refused(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, swallows: bool
) -> None:
    """And a listener that goes on in spite of the refusal leaves nothing but what is committed with the message."""
    outbox = make_outbox(transport=transport, observers=[watch])
    refused: list[str] = []

    def in_loop(name: str) -> Any:
        async def listener(body: int, session: AsyncSession) -> None:
            await session.execute(effects.write(f"loop {name}"))
            try:
                await ASYNC_ENDS[name](session)
            except TransactionError:
                refused.append(f"loop {name}")
                if not swallows:
                    raise
            if not swallows:
                raise AssertionError("not refused")

        return listener

    def in_thread(name: str) -> Any:
        def listener(body: int, session: Session) -> None:
            session.execute(effects.write(f"thread {name}"))
            try:
                PLAIN_ENDS[name](session)
            except TransactionError:
                refused.append(f"thread {name}")
                if not swallows:
                    raise

        return listener

    listeners = [listen("#", queue=f"loop {name}", retry_delays=())(in_loop(name)) for name in ASYNC_ENDS]
    listeners += [listen("#", queue=f"thread {name}", retry_delays=())(in_thread(name)) for name in PLAIN_ENDS]
    outcomes = await ends(outbox, watch, listeners, len(listeners))
    assert sorted(refused) == sorted(listener.queue for listener in listeners)
    done = {queue for queue, ended in outcomes.items() if isinstance(ended[0], Done)}
    assert set(await effects.all()) == done  # as text it was not even sent, and nothing is wrong
    assert done == ({queue for queue in outcomes if queue.split()[-1] in TEXTS} if swallows else set())
    errors = [ended[0].error for queue, ended in outcomes.items() if queue not in done]
    assert all("TransactionError: the listener" in error for error in errors), errors


@on(("postgresql+asyncpg", MEMORY), ("sqlite", None))
async def test_sessions_of_a_factory_are_watched_too(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    in_loops, in_threads = async_sessionmaker(outbox.engines.asynchronous), sessionmaker(outbox.engines.synchronous)

    @listen("#", queue="loop", retry_delays=(), session_factory=in_loops)
    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("loop"))
        await session.close()

    @listen("#", queue="thread", retry_delays=(), session_factory=in_threads)
    def in_thread(body: int, session: Session) -> None:
        with session:
            session.execute(effects.write("thread"))

    outcomes = await ends(outbox, watch, [in_loop, in_thread], 2)
    assert all(isinstance(ended[0], Dead) for ended in outcomes.values()), outcomes
    assert await effects.all() == []


@on(("postgresql+asyncpg", MEMORY), ("postgresql+psycopg", None), ("sqlite", MEMORY), ("mariadb+asyncmy", None))
async def test_a_transaction_that_was_ended_on_the_driver_is_not_tried_again(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """Its effects are committed: a retry would repeat them."""
    outbox = make_outbox(transport=transport, observers=[watch])
    delays = (0, 0)

    def end(connection: Connection) -> None:
        connection.connection.commit()

    def again(connection: Connection) -> None:
        connection.connection.cursor().execute("SELECT 1")

    async def commit(session: AsyncSession, what: str) -> None:
        await session.execute(effects.write(what))
        await session.run_sync(lambda plain: end(plain.connection()))

    @listen("#", queue="returns", retry_delays=delays)
    async def returns(body: int, session: AsyncSession) -> None:
        await commit(session, "returns")

    @listen("#", queue="raises", retry_delays=delays)
    async def raises(body: int, session: AsyncSession) -> None:
        await commit(session, "raises")
        raise OSError("after all")

    @listen("#", queue="goes on", retry_delays=delays)
    async def goes_on(body: int, session: AsyncSession) -> None:
        await commit(session, "goes on")
        await session.execute(effects.write("is not executed"))

    @listen("#", queue="times out", retry_delays=delays, timeout=3)
    async def times_out(body: int, session: AsyncSession) -> None:
        await commit(session, "times out")
        await asyncio.sleep(60)

    @listen("#", queue="is cancelled", retry_delays=delays)
    async def is_cancelled(body: int, session: AsyncSession) -> None:
        await commit(session, "is cancelled")
        raise asyncio.CancelledError

    @listen("#", queue="begins again", retry_delays=delays)
    async def begins_again(body: int, session: AsyncSession) -> None:
        await commit(session, "begins again")
        await session.run_sync(lambda plain: again(plain.connection()))
        raise OSError("after all")

    @listen("#", queue="lists", retry_delays=delays, batch=10)
    async def lists(bodies: list[int], session: AsyncSession) -> None:
        await commit(session, "lists")
        raise OSError("after all")

    @listen("#", queue="thread", retry_delays=delays)
    def thread(body: int, session: Session) -> None:
        session.execute(effects.write("thread"))
        end(session.connection())
        raise OSError("after all")

    @listen("#", queue="thread begins again", retry_delays=delays)
    def thread_begins_again(body: int, session: Session) -> None:
        session.execute(effects.write("thread begins again"))
        end(session.connection())
        again(session.connection())
        raise OSError("after all")

    @listen("#", queue="thread times out", retry_delays=delays, timeout=1)
    def thread_times_out(body: int, session: Session) -> None:
        session.execute(effects.write("thread times out"))
        end(session.connection())
        time.sleep(1.5)

    @listen("#", queue="thread in lists times out", retry_delays=delays, timeout=1, batch=10)
    def thread_in_lists(bodies: list[int], session: Session) -> None:
        session.execute(effects.write("thread in lists times out"))
        end(session.connection())
        time.sleep(1.5)

    listeners = [returns, raises, goes_on, times_out, is_cancelled, begins_again, lists]
    listeners += [thread, thread_begins_again, thread_times_out, thread_in_lists]
    outcomes = await ends(outbox, watch, listeners, len(listeners))
    for ended in outcomes.values():
        assert [outcome.reason for outcome in ended] == [Reason.REJECTED], outcomes
        assert "TransactionEnded" in ended[0].error and "driver's own connection" in ended[0].error
    assert sorted(await effects.all()) == sorted(listener.queue for listener in listeners)


@on(("postgresql+psycopg", MEMORY), ("postgresql+asyncpg", None))
async def test_an_end_behind_other_statements_of_one_text_is_refused_too(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """psycopg sends them all, and the last of them begins another transaction. asyncpg sends one statement."""
    outbox = make_outbox(transport=transport, observers=[watch])
    write = f"INSERT INTO {effects.table.name} (what, n) VALUES ('one', 1)"

    @listen("#", queue="q", retry_delays=(0,))
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text(f"{write}; COMMIT; BEGIN"))

    outcomes = await ends(outbox, watch, [listener], 2)
    assert "the listener executed COMMIT" in outcomes["q"][-1].error
    with pytest.raises(TransactionError, match="the text COMMIT"):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", 2)
            await session.execute(text(f"{write}; COMMIT; BEGIN"))
    assert await effects.all() == []


@on(("postgresql+psycopg", MEMORY), ("postgresql+psycopg", None), ("sqlite", MEMORY))
async def test_a_driver_that_has_begun_another_transaction_hides_no_end_of_the_first(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """It begins one by itself with the next statement."""
    outbox = make_outbox(transport=transport, observers=[watch])
    delays = (0, 0)

    @listen("#", queue="raises", retry_delays=delays)
    async def raises(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("raises"))
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver.commit()
        await driver.execute("SELECT 1")
        raise OSError("after all")

    @listen("#", queue="returns", retry_delays=delays)
    async def returns(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("returns"))
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver.commit()
        await driver.execute("SELECT 1")

    @listen("#", queue="rolls back", retry_delays=delays)
    async def rolls_back(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("rolls back"))
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver.rollback()
        await driver.execute("SELECT 1")

    @listen("#", queue="thread", retry_delays=delays)
    def thread(body: int, session: Session) -> None:
        session.execute(effects.write("thread"))
        driver: Any = session.connection().connection.driver_connection
        driver.commit()
        driver.execute("SELECT 1")
        raise OSError("after all")

    listeners = [raises, returns, rolls_back, thread]
    outcomes = await ends(outbox, watch, listeners, len(listeners))
    for ended in outcomes.values():
        assert [outcome.reason for outcome in ended] == [Reason.REJECTED], outcomes
    assert sorted(await effects.all()) == ["raises", "returns", "thread"]


@on(("postgresql+asyncpg", None), ("sqlite", MEMORY))
async def test_a_transaction_that_was_ended_on_the_driver_is_not_tried_again_after_a_shutdown(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch], grace=0.1)
    committed, over = threading.Event(), threading.Event()
    asked: list[BaseException] = []

    def end(session: Session, what: str) -> None:
        session.execute(effects.write(what))
        session.connection().connection.commit()
        committed.set()

    async def on_error(error: BaseException, message: object, session: AsyncSession, attempt: object) -> None:
        asked.append(error)

    @listen("loop", queue="loop", retry_delays=(0,), timeout=30, on_error=on_error)
    async def loop(body: int, session: AsyncSession) -> None:
        await session.run_sync(end, "loop")
        await asyncio.sleep(60)

    @listen("thread", queue="thread", retry_delays=(0,), timeout=30)
    def thread(body: int, session: Session) -> None:
        end(session, "thread")
        over.wait(60)

    for listener in (loop, thread):
        await emit(outbox, 1, routing_key=listener.queue)
        async with outbox.running(relay=True, listeners=[listener]):
            await eventually(lambda: committed.is_set())
        committed.clear()
    over.set()
    outcomes = [event.outcome for event in watch.of(Handled)]
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Dead)] == [Reason.REJECTED] * 2, outcomes
    assert asked == []


@on(("postgresql+asyncpg", None), ("sqlite", MEMORY))
async def test_a_thread_whose_time_is_over_cannot_end_its_transaction_on_the_driver(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """Its message is tried again, and what it commits now would be repeated."""
    outbox = make_outbox(transport=transport, observers=[watch])
    over = threading.Event()
    refused: list[Exception] = []

    @listen("#", queue="thread", retry_delays=(), timeout=0.5)
    def thread(body: int, session: Session) -> None:
        session.execute(effects.write("thread"))
        over.wait(60)
        try:
            session.connection().connection.commit()
        except TransactionError as error:
            refused.append(error)

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[thread]):
        try:
            [handled] = await watch.wait_for(Handled, 1)
        finally:
            over.set()
        await eventually(lambda: refused)
    assert isinstance(handled.outcome, Dead) and handled.outcome.reason is Reason.EXHAUSTED
    assert await effects.all() == []


# AUTOCOMMIT.


@pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "postgresql+psycopg"], indirect=True)
async def test_a_worker_on_an_engine_in_autocommit_is_refused_at_its_start(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    options = {"asyncpg": {"isolation_level": "AUTOCOMMIT"}, "psycopg": {"connect_args": {"autocommit": True}}}
    engine = create_async_engine(database_url, **options[make_url(database_url).get_driver_name()])  # type: ignore[arg-type]
    outbox = make_outbox(db_engine=engine)

    @listen("#", queue="q")
    async def listener(body: int, session: AsyncSession) -> None: ...

    with pytest.raises(ConfigurationError, match=r"q: its session's connection is in AUTOCOMMIT.*Remove"):
        async with outbox.running(listeners=[listener]):
            pass
    await engine.dispose()


@on(("postgresql+psycopg", None), ("sqlite", MEMORY))
async def test_sessions_of_a_factory_in_autocommit_are_refused_and_no_message_is_lost(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, database_url: str
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    kind = make_url(database_url).get_backend_name()
    arguments: Any = {"isolation_level": None} if kind == "sqlite" else {"autocommit": True}
    engine = create_async_engine(database_url, connect_args=arguments)
    plain_engine = create_engine(outbox.engines.synchronous.url, isolation_level="AUTOCOMMIT")

    async def in_loop(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("in loop"))

    def in_thread(body: int, session: Session) -> None: ...

    at_start = [
        listen("#", queue="q", session_factory=async_sessionmaker(engine))(in_loop),
        listen("#", queue="q", session_factory=sessionmaker(plain_engine))(in_thread),
    ]
    for refused in at_start:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            async with outbox.running(listeners=[refused]):
                pass

    makers = [async_sessionmaker(engine), async_sessionmaker(outbox.engines.asynchronous)]
    by_message = listen("#", queue="q", retry_delays=(), session_factory=lambda message: makers[0])(in_loop)
    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[by_message]):
        [troubled, *_] = await watch.wait_for(Troubled)
        del makers[0]
        await eventually(lambda: any(isinstance(event.outcome, Done) for event in watch.of(Handled)))
    assert isinstance(troubled.error, ConfigurationError) and "AUTOCOMMIT" in str(troubled.error)
    assert not any(isinstance(event.outcome, Dead) for event in watch.of(Handled))
    assert await effects.all() == ["in loop"]
    await engine.dispose()
    plain_engine.dispose()


@on_asyncpg
async def test_a_scoped_session_can_be_used_again_after_a_listener(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, database_url: str
) -> None:
    outbox = make_outbox(observers=[watch])
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    sessions = scoped_session(sessionmaker(engine), scopefunc=lambda: "always the same")

    @listen("#", queue="q", session_factory=sessions, retry_delays=())
    def in_thread(body: int, session: Session) -> None:
        session.execute(effects.write("the listener's"))

    outcomes = await ends(outbox, watch, [in_thread], 1)
    assert isinstance(outcomes["q"][0], Done), outcomes
    sessions.execute(effects.write("another's"))
    sessions.commit()
    sessions.remove()
    engine.dispose()
    assert sorted(await effects.all()) == ["another's", "the listener's"]
