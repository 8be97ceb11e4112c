"""Timeouts, isolation and sessions by message; transactions that collide are run again on a count of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import NEVER, ConfigurationError, Message, Outbox, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import Conflicted, Handled
from outbox.inbound import reruns
from tests.support.databases import on_postgresql
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects, Watch, reached

SHORT, LIMIT = 1.0, 3.0  # seconds that one listener exceeds, and that the next one does not, whatever holds it up


@pytest.fixture(params=[None, "memory://"], ids=["database", "memory"])
def transport(request: pytest.FixtureRequest) -> str | None:
    named: str | None = request.param
    return named


def on_server(url: str, statement: str) -> list[tuple[object, ...]]:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


# Timeouts.


async def test_a_timeout_may_depend_on_the_message(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    def patience(message: Message) -> float | timedelta | None:
        limits: dict[str, float | timedelta] = {"hasty": 0.05, "patient": timedelta(minutes=5)}
        return limits.get(message.key or "")

    @listen("#", queue="q", timeout=patience, retry_delays=())
    async def listener(body: int) -> None:
        await asyncio.sleep(0.5)

    await emit(outbox, 1, key="hasty")
    await emit(outbox, 2, key="patient")
    await emit(outbox, 3)
    async with outbox.running(relay=True, listeners=[listener]):
        ended = await watch.wait_for(Handled, 3)
    assert {event.attempt.message.body: type(event.outcome) for event in ended} == {b"1": Dead, b"2": Done, b"3": Done}


async def test_a_function_that_gives_no_duration_is_a_failed_attempt(make_outbox: MakeOutbox, watch: Watch) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", timeout=lambda message: -1, retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and "timeout is negative: -1" in outcome.error


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_limit_beyond_the_lease_is_refused_for_one_message_too(make_outbox: MakeOutbox, watch: Watch) -> None:
    """SQLite: while the listener's transaction is open, its lease cannot be renewed."""
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", timeout=lambda message: 20, lease=10, retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and "timeout=20 s is not shorter than its lease of 10 s" in outcome.error


@on_postgresql
async def test_a_statement_that_outlasts_the_timeout_ends_on_the_server_and_its_connection_with_it(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, database_url: str
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    mark = f"zombie {effects.table.name}"
    connections: list[int] = []

    @listen("#", queue="q", timeout=lambda message: LIMIT if connections else 2 * SHORT, retry_delays=(0,))
    async def listener(body: int, session: AsyncSession, attempt_count: int) -> None:
        await session.execute(effects.write(f"attempt {attempt_count}"))
        connections.append(await session.scalar(text("SELECT pg_backend_pid()")) or 0)
        if attempt_count == 1:
            await session.execute(text(f"SELECT pg_sleep(600) /* {mark} */"))

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        first, second = await watch.outcomes(2)
        still = f"SELECT pid FROM pg_stat_activity WHERE pid = {connections[0]}"
        async with asyncio.timeout(PATIENCE):
            while await asyncio.to_thread(on_server, database_url, still):
                await asyncio.sleep(0.1)
    assert isinstance(first, RetryIn) and isinstance(second, Done)
    assert connections[0] != connections[1]
    assert await effects.all() == ["attempt 2"]


async def test_a_listener_that_heeds_no_timeout_cannot_write_past_it(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """It catches its cancellation and goes on; and a task that it left behind tries to commit by itself."""
    outbox = make_outbox(transport=transport, observers=[watch])
    left_behind: list[asyncio.Task[None]] = []
    over = asyncio.Event()

    @listen("#", queue="q", timeout=lambda message: LIMIT if left_behind else 2 * SHORT, retry_delays=(0,))
    async def listener(body: int, session: AsyncSession, attempt_count: int) -> None:
        async def zombie() -> None:
            await reached(over)
            await session.execute(effects.write("zombie"))
            await session.commit()

        if attempt_count == 1:
            await session.execute(effects.write("in time"))
            left_behind.append(asyncio.create_task(zombie()))
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await session.execute(effects.write("late"))
        else:
            await session.execute(effects.write("second"))

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[listener]):
        [first] = await watch.outcomes(1)
        assert isinstance(first, RetryIn) and "did not heed its cancellation" in first.error
        second = (await watch.outcomes(2))[1]
        over.set()
        [gone] = await asyncio.gather(*left_behind, return_exceptions=True)
    assert isinstance(second, Done)
    assert isinstance(gone, Exception)
    assert await effects.all() == ["second"]


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql+psycopg"], indirect=True)
async def test_a_thread_that_outlasts_its_timeout_keeps_its_place_and_commits_nothing(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    seen: list[str] = []

    def patience(message: Message) -> float:
        return SHORT if message.body == b"1" else LIMIT

    @listen("#", queue="q", timeout=patience, retry_delays=(), concurrency=1)
    def listener(body: int, session: Session) -> None:
        if body == 1:
            time.sleep(2 * SHORT)  # SQLite: nobody can write how it ended before it lets go of the file
        session.execute(effects.write(f"order {body}"))
        seen.append(f"end of {body}")

    await emit(outbox, 1, 2)
    async with outbox.running(relay=True, listeners=[listener]):
        late, quick = await watch.outcomes(2)
    assert isinstance(late, Dead) and isinstance(quick, Done)
    assert seen == ["end of 1", "end of 2"], "the second one waited for the place of the first"
    assert await effects.all() == ["order 2"]


# Isolation.


@on_postgresql
async def test_an_isolation_level_may_depend_on_the_message(
    make_outbox: MakeOutbox, watch: Watch, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    levels: dict[str, str] = {}

    def level(message: Message) -> str | None:
        return message.headers.get("level")

    @listen("#", queue="q", isolation_level=level)
    async def listener(body: str, session: AsyncSession) -> None:
        levels[body] = await session.scalar(text("SHOW transaction_isolation")) or ""

    @listen("#", queue="plain", isolation_level="SERIALIZABLE")
    def plain(body: str, session: Session) -> None:
        levels[f"plain {body}"] = session.scalar(text("SHOW transaction_isolation")) or ""

    await emit(outbox, "strict", headers={"level": "serializable"})
    await emit(outbox, "repeatable", headers={"level": "REPEATABLE_READ"})
    await emit(outbox, "usual")
    async with outbox.running(relay=True, listeners=[listener, plain]):
        await watch.wait_for(Handled, 6)
    assert levels == {
        "strict": "serializable",
        "repeatable": "repeatable read",
        "usual": "read committed",
        "plain strict": "serializable",
        "plain repeatable": "serializable",
        "plain usual": "serializable",
    }


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_on_sqlite_every_level_is_kept_because_there_is_but_the_strictest(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", isolation_level="READ COMMITTED")
    async def listener(body: int, session: AsyncSession) -> None:
        connection = await session.connection()
        raw = await connection.get_raw_connection()
        assert raw.driver_connection is not None and raw.driver_connection.in_transaction, "begun before it reads"
        await session.execute(effects.write("written"))

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        assert await watch.outcomes(1) == [Done(in_transaction=True)]
    assert await effects.all() == ["written"]


# Collisions.


async def test_transactions_that_collide_are_run_again_and_burn_no_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    """Every message reads the balance and writes what it read plus one: a lost update would be seen."""
    outbox = make_outbox(transport=transport, observers=[watch])
    table, messages = effects.table, 20
    async with outbox.transaction() as session:
        await session.execute(effects.write("balance"))

    @listen("#", queue="q", isolation_level="REPEATABLE READ", concurrency=3, retry_delays=(0,) * 20)
    async def listener(body: int, session: AsyncSession) -> None:
        balance = await session.scalar(select(table.c.n).where(table.c.what == "balance")) or 0
        await session.execute(update(table).where(table.c.what == "balance").values(n=balance + 1))

    await emit(outbox, *range(messages))
    async with outbox.running(relay=True, listeners=[listener]):
        while len([each for each in await watch.wait_for(Handled) if isinstance(each.outcome, Done)]) < messages:
            await watch.wait_for(Handled, len(watch.of(Handled)) + 1)
    async with outbox.transaction() as session:
        assert await session.scalar(select(table.c.n)) == messages
    if outbox.store.transactions.writes_side_by_side:
        assert len(watch.of(Conflicted)) > len([each for each in watch.of(Handled) if each.error is not None])


@on_postgresql
async def test_collisions_have_a_count_of_their_own_and_then_the_attempt_has_failed(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    monkeypatch.setattr(reruns, "RUNS", 3)
    bodies: list[list[int]] = []

    @listen("#", queue="q", retry_delays=(0,))
    async def listener(body: list[int], session: AsyncSession, attempt_count: int) -> None:
        body.append(attempt_count)
        bodies.append(body)
        await session.execute(effects.write(f"run {len(bodies)}"))
        if len(bodies) < 5:
            await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"))

    await emit(outbox, [])
    async with outbox.running(relay=True, listeners=[listener]):
        first, second = await watch.outcomes(2)
    assert bodies == [[1], [1], [1], [2], [2]], "each run has a body of its own"
    assert isinstance(first, RetryIn) and isinstance(second, Done)
    assert [event.run for event in watch.of(Conflicted)] == [1, 2, 1]
    assert await effects.all() == ["run 5"]


@on_postgresql
async def test_a_list_that_collides_is_run_again_with_bodies_of_its_own(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    runs: list[list[list[int]]] = []

    @listen("#", queue="q", batch=10, retry_delays=())
    async def listener(bodies: list[list[int]], session: AsyncSession) -> None:
        for body in bodies:
            body.append(0)
            await session.execute(effects.write("once"))
        runs.append(bodies)
        if len(runs) == 1:
            await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"))

    await emit(outbox, [], [], [])
    async with outbox.running(relay=True, listeners=[listener]):
        assert all(isinstance(outcome, Done) for outcome in await watch.outcomes(3))
    assert all(body == [0] for bodies in runs for body in bodies)
    assert len(watch.of(Conflicted)) == 1
    assert await effects.all() == ["once"] * 3


@on_postgresql
async def test_a_copy_that_collides_with_the_inbox_entry_of_another_skips(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    """REPEATABLE READ does not see an entry that was committed after its snapshot: PostgreSQL raises 40001."""
    outbox = make_outbox(transport="memory://", observers=[watch])
    started, release = asyncio.Event(), asyncio.Event()

    @listen("#", queue="q", isolation_level="REPEATABLE READ")
    async def listener(body: int, session: AsyncSession) -> None:
        started.set()
        await reached(release)
        await session.execute(effects.write("once"))

    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, 1)
        await reached(started)
        await outbox.transport.publish([outbox.transport.published[0]])  # type: ignore[attr-defined]
        insert = "query ~ '^INSERT INTO (public.)?t'"
        waits = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {insert}"
        async with asyncio.timeout(PATIENCE):
            url = outbox.engines.asynchronous.url.render_as_string(hide_password=False)
            while (await asyncio.to_thread(on_server, url, waits))[0][0] == 0:
                await asyncio.sleep(0.05)
        release.set()
        assert await watch.outcomes(2) == [Done(), Done()]
    assert await effects.all() == ["once"]
    assert len(watch.of(Conflicted)) == 1


async def test_a_failure_that_is_no_collision_is_no_further_run(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(observers=[watch])
    runs: list[int] = []

    @listen("#", queue="q", retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        await session.execute(text("SELECT nothing FROM nowhere"))

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead) and runs == [1] and watch.of(Conflicted) == []


# Sessions.


@pytest.fixture
async def other_role(outbox: Outbox, effects: Effects, database_url: str, table_name: str) -> AsyncIterator[str]:
    """A user of that PostgreSQL who may end messages and write effects, and nothing else; the URL for it."""
    await outbox.create_tables()
    role = f"{table_name}_other"
    messages, inbox = outbox.tables.messages.name, outbox.tables.inbox.name
    grants = f"""
        CREATE ROLE {role} LOGIN PASSWORD '{role}';
        GRANT SELECT (id, lease_token, lease_until), DELETE ON {messages} TO {role};
        GRANT INSERT ON {inbox} TO {role};
        GRANT SELECT, INSERT ON {effects.table.name} TO {role};
        GRANT USAGE ON SEQUENCE {effects.table.name}_id_seq TO {role}"""
    await asyncio.to_thread(on_server, database_url, grants)
    yield make_url(database_url).set(username=role, password=role).render_as_string(hide_password=False)
    await asyncio.to_thread(on_server, database_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


@on_postgresql
async def test_some_messages_may_be_handled_as_another_role_with_just_the_rights_it_needs(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, other_role: str
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])
    engine = create_async_engine(other_role)
    users: dict[str, str] = {}

    def factory(message: Message) -> Any:
        return {"url": other_role, "maker": async_sessionmaker(engine)}.get(message.key or "")

    @listen("#", queue="q", session_factory=factory, retry_delays=())
    async def listener(body: str, session: AsyncSession) -> None:
        users[body] = await session.scalar(text("SELECT current_user")) or ""
        await session.execute(effects.write(body))

    @listen("#", queue="plain", session_factory=other_role, retry_delays=())
    def plain(body: str, session: Session) -> None:
        users[f"plain {body}"] = session.scalar(text("SELECT current_user")) or ""

    for key in ("url", "maker", "usual"):
        await emit(outbox, key, key=key)
    async with outbox.running(relay=True, listeners=[listener, plain]):
        outcomes = await watch.outcomes(6)
    await engine.dispose()
    role = make_url(other_role).username
    assert all(isinstance(outcome, Done) for outcome in outcomes), outcomes
    assert {who: name == role for who, name in users.items()} == {
        "url": True,
        "maker": True,
        "usual": False,
        "plain url": True,
        "plain maker": True,
        "plain usual": True,
    }
    assert sorted(await effects.all()) == ["maker", "url", "usual"]


@on_postgresql
async def test_another_role_needs_other_rights_where_messages_are_kept(
    make_outbox: MakeOutbox, watch: Watch, other_role: str, database_url: str
) -> None:
    outbox = make_outbox(observers=[watch], clean_up_after=NEVER)
    messages, role = outbox.tables.messages.name, make_url(other_role).username
    changes = "UPDATE (done_at, attempts, lease_token, lease_until), SELECT (attempts)"
    rights = f"REVOKE DELETE ON {messages} FROM {role}; GRANT {changes} ON {messages} TO {role}"
    await asyncio.to_thread(on_server, database_url, rights)

    @listen("#", queue="q", session_factory=other_role, retry_delays=())
    async def listener(body: str, session: AsyncSession) -> None: ...

    await emit(outbox, "kept")
    async with outbox.running(listeners=[listener]):
        assert await watch.outcomes(1) == [Done(in_transaction=True)]


@on_postgresql
async def test_engines_that_were_made_for_a_listener_are_closed_with_the_outbox(
    make_outbox: MakeOutbox, watch: Watch, other_role: str, database_url: str
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", session_factory=other_role)
    async def listener(body: int, session: AsyncSession) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await watch.outcomes(1)
    connected = f"SELECT pid FROM pg_stat_activity WHERE usename = '{make_url(other_role).username}'"
    assert len(await asyncio.to_thread(on_server, database_url, connected)) == 1
    await outbox.close()
    async with asyncio.timeout(PATIENCE):
        while await asyncio.to_thread(on_server, database_url, connected):
            await asyncio.sleep(0.05)


async def test_a_session_factory_works_on_every_database(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, transport: str | None, database_url: str
) -> None:
    outbox = make_outbox(transport=transport, observers=[watch])

    class Marked(AsyncSession):
        pass

    maker = async_sessionmaker(outbox.engines.asynchronous, class_=Marked)
    kinds: list[type] = []

    @listen("#", queue="made", session_factory=maker)
    async def made(body: int, session: AsyncSession) -> None:
        kinds.append(type(session))
        await session.execute(effects.write("made"))

    @listen("#", queue="by url", session_factory=database_url)
    async def by_url(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write("by url"))

    await emit(outbox, 1)
    async with outbox.running(relay=True, listeners=[made, by_url]):
        await watch.outcomes(2)
    assert sorted(await effects.all()) == ["by url", "made"] and kinds == [Marked]


async def test_a_factory_that_gives_the_wrong_thing_is_a_failed_attempt(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects
) -> None:
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q", session_factory=lambda: "no session", retry_delays=())  # type: ignore[arg-type]
    async def listener(body: int, session: AsyncSession) -> None: ...

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead)
    assert "session_factory gave str, and the listener asks for AsyncSession" in outcome.error


@pytest.mark.parametrize("options", [{"isolation_level": "SERIALIZABLE"}, {"session_factory": "sqlite:///x.db"}])
async def test_options_of_a_session_that_nobody_asks_for_are_refused(
    make_outbox: MakeOutbox, database_url: str, options: dict[str, Any]
) -> None:
    outbox = make_outbox()

    @listen("#", queue="q", **(options if "isolation_level" in options else {"session_factory": database_url}))
    async def listener(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="q asks for no session: give its callback an argument"):
        await outbox.worker([listener])


@on_postgresql
async def test_a_factory_for_another_kind_of_database_is_refused(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()

    @listen("#", queue="q", session_factory="sqlite:///elsewhere.db")
    async def listener(body: int, session: AsyncSession) -> None: ...

    with pytest.raises(ConfigurationError, match="session_factory leads to sqlite, and the messages are in postgresql"):
        await outbox.worker([listener])
