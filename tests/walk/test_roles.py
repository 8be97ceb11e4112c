"""`tables sql --roles`: everything works under the rights that it grants, and nothing beyond them does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox, Reject, TablesMissing, listen
from outbox.cli.exits import ExitCode
from outbox.core.events import CircuitClosed, CircuitOpened
from tests.support.commands import Command, all_dead, until
from tests.support.databases import on_postgresql
from tests.support.observing import Recorder
from tests.support.outboxes import MakeOutbox

from .destinations import Sink, nothing, yes

pytestmark = on_postgresql

KINDS = ("producer", "relay", "worker", "operator")
SECURITY_PAGE = Path(__file__).parents[2] / "docs/operate/security.md"


@dataclass(frozen=True)
class Roles:
    """Users who were granted the roles of one outbox, and a superuser beside them."""

    url: str
    table_name: str

    def user(self, kind: str) -> str:
        return f"{self.table_name}_{kind}_user"

    def url_of(self, kind: str) -> str:
        url = make_url(self.url).set(username=self.user(kind), password=self.user(kind))
        return url.render_as_string(hide_password=False)

    def run(self, script: str, kind: str | None = None) -> list[tuple[object, ...]]:
        """Run a script as a superuser, or as one of the users; the rows of its last statement."""
        url = make_url(self.url if kind is None else self.url_of(kind)).set(drivername="postgresql")
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as connection:
            cursor = connection.execute(script.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
async def roles(command: Command, make_outbox: MakeOutbox, database_url: str, table_name: str) -> AsyncIterator[Roles]:
    await make_outbox().create_tables()
    roles = Roles(database_url, table_name)
    ran = await command.run("tables", "sql", "--roles", "--role-prefix", table_name)
    assert ran.code == 0
    for _ in range(2):  # a second time does no harm
        await asyncio.to_thread(roles.run, ran.stdout)
    for kind in KINDS:
        login = f"LOGIN PASSWORD '{roles.user(kind)}' IN ROLE {table_name}_{kind}"
        await asyncio.to_thread(roles.run, f"CREATE ROLE {roles.user(kind)} {login}")
    yield roles
    names = ", ".join(f"{table_name}_{kind}{user}" for kind in KINDS for user in ("", "_user"))
    await asyncio.to_thread(roles.run, f"DROP OWNED BY {names}; DROP ROLE {names}")


@dataclass
class Shop:
    """Listeners of every kind, and what they did."""

    table: str
    fails: bool = True

    @property
    def listeners(self) -> list[Listener]:
        @listen("order.created", queue="ledger", retry_delays=(0.05,) * 20)
        async def ledger(body: int, session: AsyncSession) -> None:
            await session.execute(text(f"INSERT INTO {self.table} VALUES (:body)"), {"body": body})

        @listen("order.*", queue="mails", retry_delays=(0.05, 0.05))
        async def mails(body: int) -> None:
            if self.fails:
                raise ConnectionError("away")

        @listen("order.refused", queue="bills")
        async def bills(body: int) -> None:
            if self.fails:
                raise Reject("never")

        return [ledger, mails, bills]


@pytest.fixture
def shop(roles: Roles) -> Shop:
    table = f"{roles.table_name}_ledger"
    roles.run(f"CREATE TABLE {table} (body integer); GRANT INSERT ON {table} TO {roles.user('worker')}")
    return Shop(table)


async def nothing_left(outbox: Outbox) -> bool:
    return not await outbox.messages()


async def test_the_whole_walk_works_under_the_roles(roles: Roles, shop: Shop, make_outbox: MakeOutbox) -> None:
    producer, worker, operator = (
        make_outbox(db_engine_url=roles.url_of(k)) for k in ("producer", "worker", "operator")
    )
    command = Command(
        folder=None,  # type: ignore[arg-type]
        settings={"OUTBOX_DB_ENGINE_URL": roles.url_of("operator"), "OUTBOX_TABLE_NAME": roles.table_name},
    )
    async with worker.running(listeners=shop.listeners):
        async with producer.transaction() as session:
            await producer.emit_many(session, "order.created", range(5))
            await producer.emit(session, "order.refused", 5)
            await producer.emit(session, "order.created", 6, eta=timedelta(hours=1), timer_id="t")
            assert await producer.emit(session, "order.created", 7, eta=timedelta(hours=1), timer_id="t") is None
            await producer.emit(session, "order.created", 8, eta=timedelta(hours=1), expiration=0.1)
            await producer.emit(session, "nobody.asks", 9)
        # Six messages in the queue of mails end after their retries, one is refused at once.
        letters = await until(lambda: all_dead(operator, 7))
        assert {(letter.queue, letter.reason) for letter in letters} == {("mails", "exhausted"), ("bills", "rejected")}
        shop.fails = False
        assert await operator.dead_letters.replay([letter.id for letter in letters]) == 7
        await until(lambda: nothing_in_queues_and(operator, waiting=2, unroutable=1))
    rows = await asyncio.to_thread(roles.run, f"SELECT body FROM {shop.table} ORDER BY body")
    assert rows == [(body,) for body in range(5)]

    status = await command.run("status", "--interval", "0", "--json")
    assert (status.code, status.document["waiting"], status.document["unroutable"]) == (0, 2, 1)
    assert (await command.run("messages", "list", "--body")).code == 0
    assert (await command.run("queues", "list")).code == 0
    assert (await command.run("queues", "remove", "bills")).code == 0
    assert (await command.run("tables", "check")).code == 0
    assert (await command.run("tables", "switch-transport", "database")).code == 0
    doctor = await command.run("doctor", "--json")
    assert [finding["subject"] for finding in doctor.document["findings"] if finding["level"] != "ok"] == ["routing"]


async def nothing_in_queues_and(operator: Outbox, **counts: int) -> bool:
    backlog = await operator.backlog()
    queued = any(queue.queued or queue.retrying for queue in backlog.queues)
    return not backlog.dead and not queued and all(getattr(backlog, name) == count for name, count in counts.items())


async def test_a_worker_stores_first_and_receives_under_its_role(
    roles: Roles, shop: Shop, make_outbox: MakeOutbox
) -> None:
    shop.fails = False
    worker = make_outbox(db_engine_url=roles.url_of("worker"), transport="memory://")
    operator = make_outbox(db_engine_url=roles.url_of("operator"))
    async with worker.running(listeners=shop.listeners, store_first=True):
        await worker.transport.publish([Message(routing_key="order.created", body=b"1")])
        assert await worker.receive("ledger", Message(routing_key="order.created", body=b"2"))
        assert await worker.receive("nobodys", Message(routing_key="order.created", body=b"3"))
        [letter] = await until(lambda: all_dead(operator, 1))
        assert (letter.queue, letter.reason) == ("nobodys", "unwanted")

        async def both() -> bool:
            found = await asyncio.to_thread(roles.run, f"SELECT body FROM {shop.table} ORDER BY body")
            return bool(found == [(1,), (2,)])

        await until(both)


async def test_a_relay_routes_for_workers_that_come_later(roles: Roles, shop: Shop, make_outbox: MakeOutbox) -> None:
    producer, relay, worker, operator = (make_outbox(db_engine_url=roles.url_of(kind)) for kind in KINDS)
    async with worker.running(listeners=shop.listeners):
        pass  # its bindings stay
    async with relay.running(relay=True):
        async with producer.transaction() as session:
            await producer.emit_many(session, "order.created", range(3))
        await until(lambda: delivered(operator, 6))
    shop.fails = False
    async with worker.running(listeners=shop.listeners):
        await until(lambda: nothing_left(operator))


async def delivered(operator: Outbox, count: int) -> bool:
    return len(await operator.messages(state="queued")) == count


async def test_a_relay_hands_messages_to_a_transport_tries_again_gives_up_and_cleans_up(
    roles: Roles, make_outbox: MakeOutbox
) -> None:
    sent: list[bytes] = []

    async def publish(message: Message) -> None:
        if message.routing_key == "wrong" or len(sent) == 3:
            sent.append(b"")
            raise ConnectionError("away")
        sent.append(message.body)

    relay = make_outbox(
        db_engine_url=roles.url_of("relay"),
        transport=publish,
        relay_retry_delays=(0.05, 0.05),
        clean_up_after=timedelta(milliseconds=200),
        poll_interval=0.05,
    )
    producer = make_outbox(db_engine_url=roles.url_of("producer"))
    operator = make_outbox(db_engine_url=roles.url_of("operator"))
    async with relay.running(relay=True):
        async with producer.transaction() as session:
            await producer.emit_many(session, "right", range(10))
            await producer.emit(session, "late", 0, eta=timedelta(hours=1), expiration=timedelta(milliseconds=1))
            await producer.emit(session, "wrong", 1)
        [letter] = await until(lambda: all_dead(operator, 1))
        assert letter.reason == "exhausted"
        await until(lambda: only_waits(operator, 1))  # those that were sent are cleaned up, the late one is not due
    assert {b"%d" % number for number in range(10)} <= set(sent)


async def test_a_relay_shares_what_it_knows_of_its_destination(roles: Roles, make_outbox: MakeOutbox) -> None:
    sink, recorder = Sink(nothing), Recorder()
    relay = make_outbox(db_engine_url=roles.url_of("relay"), transport=sink, observers=[recorder])
    operator = make_outbox(db_engine_url=roles.url_of("operator"))
    async with relay.running(relay=True):
        async with relay.transaction() as session:
            await relay.emit(session, "a", 1)
        await recorder.wait_for(CircuitOpened)
        [circuit] = (await operator.backlog()).circuits
        assert circuit.failures
        sink.answer = yes
        await recorder.wait_for(CircuitClosed)


async def test_a_relay_with_routes_needs_what_is_printed_as_a_comment(
    roles: Roles, make_outbox: MakeOutbox, command: Command
) -> None:
    sent: list[bytes] = []

    async def billing(message: Message) -> None:
        sent.append(message.body)

    relay = make_outbox(db_engine_url=roles.url_of("relay"), routes={"#": billing})
    with pytest.raises(DBAPIError, match="permission denied"):
        async with relay.running(relay=True):
            pass
    printed = (await command.run("tables", "sql", "--roles", "--role-prefix", roles.table_name)).stdout
    comment = printed.split("Only if there are any:\n")[1].split("\n\n")[0]
    roles.run(comment.replace("-- ", ""))
    async with relay.running(relay=True):
        async with relay.transaction() as session:
            await relay.emit(session, "a", 1)
        await until(lambda: sent)
    rebinding = make_outbox(db_engine_url=roles.url_of("relay"), routes={"a": billing}, rebind_queues=True)
    with pytest.raises(DBAPIError, match="permission denied"):
        async with rebinding.running(relay=True):
            pass
    roles.run(next(line for line in printed.splitlines() if line.startswith("-- GRANT DELETE ON")).removeprefix("-- "))
    async with rebinding.running(relay=True):
        assert [binding.binding_key for binding in await rebinding.bindings()] == ["a"]


async def test_a_worker_on_rabbitmq_records_what_it_binds_and_removes_it_with_what_is_printed_as_a_comment(
    roles: Roles, make_outbox: MakeOutbox, command: Command, rabbitmq_url: str
) -> None:
    before, after = (Listener(key, nothing, queue="billing") for key in ("order.*", "order.created"))
    given = {"db_engine_url": roles.url_of("worker"), "transport": rabbitmq_url}
    async with make_outbox(**given).running(listeners=[before]):
        pass
    rebinding = make_outbox(**given, rebind_queues=True)
    with pytest.raises(DBAPIError, match="permission denied"):
        async with rebinding.running(listeners=[after]):
            pass
    printed = (await command.run("tables", "sql", "--roles", "--role-prefix", roles.table_name)).stdout
    [comment] = [line for line in printed.splitlines() if line.startswith("-- GRANT DELETE ON") and "_owners" in line]
    roles.run(comment.removeprefix("-- "))
    async with rebinding.running(listeners=[after]):
        operator = make_outbox(db_engine_url=roles.url_of("operator"))
        assert [binding.binding_key for binding in await operator.store.owners.declared()] == ["order.created"]


async def only_waits(operator: Outbox, count: int) -> bool:
    backlog = await operator.backlog()
    return (backlog.waiting, backlog.sent) == (count, 0)


@pytest.mark.parametrize("kind", ["relay", "worker"])
async def test_what_has_expired_and_what_is_old_is_cleaned_up_under_either_role(
    roles: Roles, make_outbox: MakeOutbox, kind: str
) -> None:
    producer, worker, operator = (
        make_outbox(db_engine_url=roles.url_of(k)) for k in ("producer", "worker", "operator")
    )
    async with worker.transaction() as session:
        for _ in range(2):
            statement, [entry] = worker.store.inbox.remember("queue", "id")
            await session.execute(statement, entry)
    async with producer.transaction() as session:
        await producer.emit(session, "a", 1, expiration=timedelta(milliseconds=1))
    store = make_outbox(db_engine_url=roles.url_of(kind), clean_up_after=timedelta(0)).store
    await until(lambda: store.maintenance.expire(10))
    assert [letter.reason for letter in await operator.dead_letters.list()] == ["expired"]
    assert await store.inbox.purge(timedelta(hours=1), 10) == 0
    assert await until(lambda: store.inbox.purge(timedelta(0), 10)) == 1
    assert await store.maintenance.purge(timedelta(0), 10) == 0


async def test_a_producer_wakes_those_who_sleep(roles: Roles, shop: Shop, make_outbox: MakeOutbox) -> None:
    shop.fails = False
    producer, worker = (make_outbox(db_engine_url=roles.url_of(kind)) for kind in ("producer", "worker"))
    heard: list[str] = []
    url = make_url(roles.url).set(drivername="postgresql").render_as_string(hide_password=False)
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)

    async def hear() -> None:
        heard.extend([notification.channel async for notification in connection.notifies(stop_after=1)])

    async def emit_and_look() -> bool:
        async with producer.transaction() as session:
            await producer.emit(session, "order.created", 1)
        await asyncio.sleep(0.1)
        return bool(heard)

    await connection.execute(f'LISTEN "outbox .{roles.table_name}"')
    hearing = asyncio.create_task(hear())
    async with worker.running(listeners=shop.listeners):
        await until(lambda: roles.run(f"SELECT 1 FROM {roles.table_name}_state WHERE asleep_until > now()"))
        await until(emit_and_look)
    await hearing
    await connection.close()
    assert set(heard) == {f"outbox .{roles.table_name}"}  # the router's own word may come in the same moment


async def test_a_relay_says_that_it_sleeps(roles: Roles, make_outbox: MakeOutbox) -> None:
    async with make_outbox(db_engine_url=roles.url_of("relay")).running(relay=True):
        await until(lambda: roles.run(f"SELECT 1 FROM {roles.table_name}_state WHERE asleep_until > now()"))


async def test_a_producer_cancels_timers_only_with_the_right_that_is_printed_as_a_comment(
    roles: Roles, make_outbox: MakeOutbox, command: Command
) -> None:
    producer = make_outbox(db_engine_url=roles.url_of("producer"))
    async with producer.transaction() as session:
        await producer.emit(session, "a", 1, eta=timedelta(hours=1), timer_id="t")
    with pytest.raises(DBAPIError, match="permission denied"):
        async with producer.transaction() as session:
            await producer.cancel_timer(session, "t")
    script = (await command.run("tables", "sql", "--roles", "--role-prefix", roles.table_name)).stdout
    [grant] = [line for line in script.splitlines() if line.startswith("-- GRANT DELETE,")]
    await asyncio.to_thread(roles.run, grant.removeprefix("-- "))
    async with producer.transaction() as session:
        assert await producer.cancel_timer(session, "t")
        assert not await producer.cancel_timer(session, "t")


async def test_a_producer_emits_through_its_drivers_own_connection(roles: Roles, make_outbox: MakeOutbox) -> None:
    producer = make_outbox(db_engine_url=roles.url_of("producer"))
    url = make_url(roles.url_of("producer")).set(drivername="postgresql").render_as_string(hide_password=False)

    async def emit(connection: Any) -> None:
        timer: Any = {"eta": timedelta(hours=1), "timer_id": "t"}
        await producer.emit(connection, "a", 1, headers={"a": "b"}, key="k", expiration=60)
        await producer.emit_many(connection, "a", range(3))
        await producer.emit(connection, "a", 1, **timer)
        assert await producer.emit(connection, "a", 1, **timer) is None

    if "asyncpg" in roles.url:
        connection = await asyncpg.connect(url)
        async with connection.transaction():
            await emit(connection)
        await connection.close()
    else:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await emit(connection)
        with psycopg.connect(url) as blocking:
            producer.emit_many_sync(blocking, "a", range(3))
    [(count,)] = await asyncio.to_thread(roles.run, f"SELECT count(*) FROM {roles.table_name}")
    assert count == (5 if "asyncpg" in roles.url else 8)


async def test_an_older_grant_of_the_whole_table_is_reported_and_taken_back(roles: Roles, command: Command) -> None:
    async def producers() -> Any:
        doctor = await command.run("doctor", "--json")
        [finding] = [each for each in doctor.document["findings"] if each["subject"] == "producers"]
        return finding

    assert (await producers())["level"] == "ok"
    roles.run(f"GRANT INSERT ON {roles.table_name} TO {roles.table_name}_producer, PUBLIC")
    found = await producers()
    assert found["level"] == "warning" and f"PUBLIC, {roles.table_name}_producer may insert" in found["what"]
    assert "REVOKE INSERT" in found["advice"]
    ran = await command.run("tables", "sql", "--roles", "--role-prefix", roles.table_name)
    roles.run(f"REVOKE INSERT ON {roles.table_name} FROM PUBLIC; {ran.stdout}")
    assert (await producers())["level"] == "ok"
    for statement in FORBIDDEN["producer"]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            roles.run(statement.format(t=roles.table_name), "producer")


async def test_a_producer_cannot_make_tables_and_is_told_so(roles: Roles, make_outbox: MakeOutbox) -> None:
    schema = f"{roles.table_name}_elsewhere"
    roles.run(f"CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO {roles.user('producer')}")
    elsewhere = make_outbox(db_engine_url=roles.url_of("producer"), schema=schema)
    with pytest.raises(TablesMissing, match="this role may not make it: run `outbox tables create`"):
        async with elsewhere.transaction() as session:
            await elsewhere.emit(session, "a", 1)
    roles.run(f"DROP SCHEMA {schema}")


async def test_looking_needs_the_operators_rights(roles: Roles, command: Command) -> None:
    for words in (["status", "--interval", "0"], ["messages", "list"], ["dead-letters", "list"]):
        ran = await command.run(*words, OUTBOX_DB_ENGINE_URL=roles.url_of("producer"))
        assert (ran.code, ran.stdout, ran.error_lines) == (ExitCode.CONFIGURATION, "", 1)
        assert "permission denied" in ran.stderr
        assert (await command.run(*words, OUTBOX_DB_ENGINE_URL=roles.url_of("operator"))).code == 0


# What they may not do.

FORBIDDEN = {
    "producer": [
        "SELECT FROM {t}",
        "SELECT id FROM {t}",
        "INSERT INTO {t} (created_at, due_at, routing_key, message_id, content_type, body) "
        "VALUES (now(), now(), 'a', 'b', 'c', '') RETURNING id",
        *(
            f"INSERT INTO {{t}} (created_at, due_at, routing_key, message_id, content_type, body, {column}) "
            f"VALUES (now(), now(), 'a', 'b', 'c', '', {value})"
            for column, value in {
                "id": "1",
                "attempts": "1",
                "starts": "2147483647",
                "destination": "'billing'",
                "done_at": "now()",
                "first_due_at": "now()",
                "history": "'x'",
                "lease_token": "gen_random_uuid()",
                "lease_until": "'infinity'",
                "routed_at": "now()",
                "unroutable": "true",
            }.items()
        ),
        "UPDATE {t} SET due_at = now()",
        "DELETE FROM {t}",
        "TRUNCATE {t}",
        "SELECT error FROM {t}_dead_letters",
        "DELETE FROM {t}_dead_letters",
        "SELECT queue FROM {t}_bindings",
        "INSERT INTO {t}_bindings VALUES ('q', '#')",
        "SELECT owner FROM {t}_owners",
        "SELECT transport FROM {t}_state",
        "UPDATE {t}_state SET asleep_until = NULL",
        "INSERT INTO {t}_inbox VALUES ('q', 'm', now())",
    ],
    "relay": [
        "UPDATE {t} SET body = ''",
        "UPDATE {t} SET routing_key = 'other'",
        "UPDATE {t} SET headers = NULL",
        "TRUNCATE {t}",
        "SELECT error FROM {t}_dead_letters",
        "UPDATE {t}_dead_letters SET reason = 'rejected'",
        "DELETE FROM {t}_dead_letters",
        "INSERT INTO {t}_bindings VALUES ('q', '#')",
        "DELETE FROM {t}_bindings",
        "INSERT INTO {t}_inbox VALUES ('q', 'm', now())",
        "UPDATE {t}_inbox SET message_id = 'x'",
        "UPDATE {t}_owners SET owner = 'x'",
        "DELETE FROM {t}_owners",
        "UPDATE {t}_state SET bindings_version = 0",
        "DELETE FROM {t}_state",
        "DROP TABLE {t}",
    ],
    "worker": [
        "UPDATE {t} SET body = ''",
        "UPDATE {t} SET message_id = 'other'",
        "SELECT error FROM {t}_dead_letters",
        "DELETE FROM {t}_dead_letters",
        "DELETE FROM {t}_bindings",
        "UPDATE {t}_bindings SET queue = 'x'",
        "UPDATE {t}_inbox SET queue = 'x'",
        "DELETE FROM {t}_state",
        "ALTER TABLE {t} ADD COLUMN x integer",
    ],
    "operator": [
        "UPDATE {t} SET due_at = now()",
        "DELETE FROM {t}",
        "INSERT INTO {t}_dead_letters (died_at) VALUES (now())",
        "UPDATE {t}_dead_letters SET body = ''",
        "INSERT INTO {t}_bindings VALUES ('q', '#')",
        "SELECT queue FROM {t}_inbox",
        "DELETE FROM {t}_inbox",
        "DELETE FROM {t}_state",
        "SELECT setval('{t}_id_seq', 1)",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_beyond_the_rights_is_allowed(roles: Roles, kind: str) -> None:
    for statement in FORBIDDEN[kind]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            roles.run(statement.format(t=roles.table_name), kind)


# Read as: on the whole table; on some columns (+).
RIGHTS = {
    "producer": {"": "INSERT+", "_state": "SELECT+"},
    "relay": {
        "": "DELETE INSERT SELECT UPDATE+",
        "_bindings": "SELECT",
        "_circuits": "INSERT SELECT UPDATE+",
        "_dead_letters": "INSERT",
        "_inbox": "DELETE SELECT UPDATE+",
        "_owners": "INSERT SELECT",
        "_state": "INSERT SELECT UPDATE+",
    },
    "worker": {
        "": "DELETE INSERT SELECT UPDATE+",
        "_bindings": "INSERT SELECT",
        "_circuits": "INSERT SELECT UPDATE+",
        "_dead_letters": "INSERT",
        "_inbox": "DELETE INSERT SELECT UPDATE+",
        "_owners": "INSERT SELECT",
        "_state": "INSERT SELECT UPDATE+",
    },
    "operator": {
        "": "INSERT SELECT",
        "_bindings": "DELETE SELECT",
        "_circuits": "SELECT",
        "_dead_letters": "DELETE SELECT UPDATE+",
        "_owners": "DELETE SELECT",
        "_state": "INSERT SELECT UPDATE+",
    },
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_role_has_exactly_these_rights(roles: Roles, kind: str) -> None:
    found: dict[str, str] = {}
    for part in ("", "_bindings", "_circuits", "_dead_letters", "_inbox", "_owners", "_state"):
        rights = []
        for right in ("DELETE", "INSERT", "REFERENCES", "SELECT", "TRIGGER", "TRUNCATE", "UPDATE"):
            table, user = f"'{roles.table_name}{part}'", f"'{roles.user(kind)}'"
            [(whole,)] = roles.run(f"SELECT has_table_privilege({user}, {table}, '{right}')")
            if whole:
                rights.append(right)
            elif right in ("INSERT", "REFERENCES", "SELECT", "UPDATE"):
                [(some,)] = roles.run(f"SELECT has_any_column_privilege({user}, {table}, '{right}')")
                rights += [f"{right}+"] if some else []
        if rights:
            found[part] = " ".join(rights)
    assert found == RIGHTS[kind]


async def test_a_producer_emits_before_somebody_makes_the_tables_that_a_newer_version_has_added(
    roles: Roles, make_outbox: MakeOutbox, table_name: str
) -> None:
    await asyncio.to_thread(roles.run, f"DROP TABLE {table_name}_owners")
    outbox = make_outbox(db_engine_url=roles.url_of("producer"))
    for _ in range(2):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", 1)
    assert await asyncio.to_thread(roles.run, f"SELECT count(*) FROM {table_name}") == [(2,)]
    await asyncio.to_thread(roles.run, f"DROP TABLE {table_name}")
    fresh = make_outbox(db_engine_url=roles.url_of("producer"))
    with pytest.raises(TablesMissing, match="this role may not make it: run `outbox tables create`"):
        async with fresh.transaction() as session:
            await fresh.emit(session, "order.created", 1)


TABLES = ("messages", "dead_letters", "bindings", "inbox", "state", "circuits", "owners")
PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")


async def test_the_page_about_security_shows_what_the_roles_may_do(roles: Roles, make_outbox: MakeOutbox) -> None:
    tables = make_outbox().tables
    lines = [f"| | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for table in TABLES:
        name = getattr(tables, table).fullname
        cells = [await asyncio.to_thread(_rights, roles, kind, name) for kind in KINDS]
        lines.append(f"| `{table}` | {' | '.join(cells)} |")
    matrix = "\n".join(lines)
    print(matrix)  # what the page should show
    assert matrix in SECURITY_PAGE.read_text()


def _rights(roles: Roles, kind: str, table: str) -> str:
    """What a role may do with a table, by the server's own word."""
    found = []
    for right in PRIVILEGES:
        [(whole,)] = roles.run(f"SELECT has_table_privilege('{roles.user(kind)}', '{table}', '{right}')")
        partly = whole
        if not whole and right in ("SELECT", "INSERT", "UPDATE", "REFERENCES"):
            [(partly,)] = roles.run(f"SELECT has_any_column_privilege('{roles.user(kind)}', '{table}', '{right}')")
        if partly:
            found.append(right if whole else f"{right}*")
    return ", ".join(found) or "nothing"
