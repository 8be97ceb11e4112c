""" "Event Status Lifecycle", with its columns, and "Monitor Outbox Table".

The rulings: pending, published, failed, invalid and expired are waiting, sent, and dead with the reasons exhausted,
refused and expired. A state follows from the columns of a row, so there is none that a constraint would have to forbid.
What is dead lies in a table of its own. What was sent is deleted unless `clean_up_after` keeps it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, inspect, select, text

from outbox import Message, Outbox, Reason
from outbox.core.events import Relayed
from tests.compatibility.edda.orders import ORDER_CREATED, is_settled, send, states, walk
from tests.support.commands import Command
from tests.support.databases import on_every_store
from tests.support.http_sink import HttpSink, by_type, status
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

pytestmark = on_every_store


LATER = timedelta(days=1)
LIFECYCLE = {  # what happens to an event, by its type, and the project's status for it
    "order.later": "waiting",  # pending
    "order.created": "sent",  # published
    "order.unlucky": "exhausted",  # failed
    "order.malformed": "refused",  # invalid
    "order.late": "expired",
}


@asynccontextmanager
async def one_of_each(outbox: Outbox, sink: HttpSink) -> AsyncIterator[dict[str, Message]]:
    """An event in every state, by type, while a relay is still at work."""
    sink.behave(by_type({"order.unlucky": status(503), "order.malformed": status(422, body=b"no such field")}))
    async with outbox.running(relay=True):
        sent = {
            "order.later": await send(outbox, "order.later", eta=LATER),
            "order.created": await send(outbox, "order.created"),
            "order.unlucky": await send(outbox, "order.unlucky"),
            "order.malformed": await send(outbox, "order.malformed"),
            "order.late": await send(outbox, "order.late", expiration=timedelta(microseconds=1)),
        }
        await eventually(lambda: _only_one_waits(outbox))
        yield sent


async def _only_one_waits(outbox: Outbox) -> bool:
    return (await outbox.backlog()).waiting == 1


@pytest.fixture
def command(database_url: str, table_name: str, tmp_path: Path) -> Command:
    """`outbox …` on the database at hand."""
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": database_url, "OUTBOX_TABLE_NAME": table_name})


# The states


async def test_an_event_ends_in_one_of_five_states(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink) as sent:
        found = dict(zip(sent, await states(service, *sent.values()), strict=True))
    assert found == LIFECYCLE


async def test_an_event_is_pending_when_it_is_created(make_http_outbox: MakeOutbox) -> None:
    service = make_http_outbox()
    sent = await send(service)
    [pending] = await service.messages()
    assert (pending.state, pending.attempt_count, pending.history) == ("waiting", 0, "")
    assert (pending.done_at, pending.error, pending.leased_until) == (None, None, None)
    assert pending.message == sent


async def test_during_its_retries_an_event_stays_pending(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    service = make_http_outbox(relay_retry_delays=(3600, 3600))
    sink.behave(status(500, body=b"broken"))
    async with service.running(relay=True):
        sent = await send(service)
        await recorder.wait_for(Relayed)
    [pending] = await service.messages(state="waiting")
    assert (pending.message.id, pending.state, pending.attempt_count) == (sent.id, "waiting", 1)
    assert pending.history.endswith("it answered 500 Internal Server Error: broken\n")
    assert pending.due_at > datetime.now(UTC)


async def test_what_is_published_is_deleted_unless_it_is_kept(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    for options, kept in (({"clean_up_after": "IMMEDIATELY"}, 0), ({"clean_up_after": timedelta(days=7)}, 1)):
        service = make_http_outbox(**options)
        async with service.running(relay=True):
            sent = await send(service)
            await eventually(lambda service=service: is_settled(service))  # type: ignore[misc]
        found = await service.find(sent.id)
        assert len(found) == kept
        assert all(each.done_at is not None and each.done_at >= sent.created_at for each in found)
    assert (await service.backlog()).sent == 1


async def test_what_is_not_pending_any_more_is_not_tried_again(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    """None of the four ends leads anywhere by itself. An operator can replay what is dead."""
    service = make_http_outbox()
    async with one_of_each(service, sink):
        pass
    before = len(sink.requests)
    sink.behave(status(200))
    async with service.running(relay=True):
        further = await send(service)
        await sink.until(before + 1)
        assert sink.ids[before:] == [further.id]
        letters = await service.dead_letters.list()
        assert await service.dead_letters.replay([letter.id for letter in letters]) == 3
        await eventually(lambda: _only_one_waits(service))
    assert sorted(sink.ids[before + 1 :]) == sorted(letter.message.id for letter in letters)
    assert await states(service, *(letter.message for letter in letters)) == ["sent"] * 3


# The columns


async def test_an_event_keeps_what_the_projects_columns_hold(make_http_outbox: MakeOutbox) -> None:
    service = make_http_outbox()
    source, content_type = "s" * 255, "application/" + "x" * 88
    sent = await send(service, "t" * 255, b"data", source=source, content_type=content_type)
    async with service.engines.asynchronous.connect() as connection:
        [row] = await connection.execute(select(service.tables.messages))
    assert (row.message_id, row.routing_key, row.body) == (sent.id, "t" * 255, b"data")
    assert (row.content_type, row.attempts, row.done_at, row.history) == (content_type, 0, None, None)
    assert source in row.headers
    found = await walk(service, sent)
    assert found.message.created_at == sent.created_at
    assert found.message.created_at.utcoffset() == timedelta(0)


async def test_times_know_their_time_zone_in_the_database(make_http_outbox: MakeOutbox) -> None:
    """On SQLite they are texts that sort, in UTC; on MySQL they are in UTC too, whatever the session's time zone is."""
    service = make_http_outbox()
    sent = await send(service)
    table = service.tables.messages.name
    kinds = {
        "sqlite": ("typeof(created_at)", "text"),
        "postgresql": ("pg_typeof(created_at)", "timestamp with time zone"),
        "mysql": (
            "(SELECT column_type FROM information_schema.columns "
            f"WHERE table_schema = DATABASE() AND table_name = '{table}' AND column_name = 'created_at')",
            "datetime(6)",
        ),
    }
    async with service.engines.asynchronous.connect() as connection:
        kind, written = kinds[connection.dialect.name]
        [(found, moment)] = await connection.execute(text(f"SELECT {kind}, created_at FROM {table}"))
    assert str(found) == written
    moment = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    assert (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) == sent.created_at


async def test_whoever_looks_for_pending_events_has_an_index(make_http_outbox: MakeOutbox) -> None:
    service = make_http_outbox()
    await service.create_tables()
    table = service.tables.messages.name
    async with service.engines.asynchronous.connect() as connection:
        found = await connection.run_sync(lambda plain: inspect(plain).get_indexes(table))
    columns = {index["name"]: index["column_names"] for index in found}
    assert columns[f"{table}_claim"][-3:] == ["destination", "due_at", "id"]  # what is done comes first on MySQL
    assert await service.check_tables() == []


# Query outbox events


async def test_pending_events_are_listed_oldest_first_up_to_a_limit(make_http_outbox: MakeOutbox) -> None:
    service = make_http_outbox()
    async with service.transaction() as session:
        sent = await service.emit_many(session, ORDER_CREATED, range(15))
    first = await service.messages(state="waiting", limit=10)
    rest = await service.messages(state="waiting", limit=10, after=first[-1].row_id)
    assert [(event.message.routing_key, event.state) for event in first] == [(ORDER_CREATED, "waiting")] * 10
    assert [event.message.id for event in first + rest] == [message.id for message in sent]


# Monitor outbox table


async def test_events_are_counted_by_their_states(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink):
        backlog = await service.backlog()
    assert (backlog.waiting, backlog.sent, backlog.dead) == (1, 1, 3)
    assert dict(backlog.dead_by_reason) == {"exhausted": 1, "refused": 1, "expired": 1}


async def test_events_are_counted_by_their_states_in_sql(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink):
        pass
    messages, letters = service.tables.messages, service.tables.dead_letters
    async with service.transaction() as session:
        is_sent = messages.c.done_at.is_not(None)
        live: Any = await session.execute(select(is_sent, func.count(messages.c.id)).group_by(is_sent))
        dead: Any = await session.execute(select(letters.c.reason, func.count(letters.c.id)).group_by(letters.c.reason))
    assert {bool(done): count for done, count in live} == {False: 1, True: 1}
    assert dict(dead.all()) == {"exhausted": 1, "refused": 1, "expired": 1}


async def test_events_are_counted_by_their_states_on_the_command_line(
    make_http_outbox: MakeOutbox, sink: HttpSink, command: Command
) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink):
        pass
    counted = (await command.run("status", "--interval", "0", "--json")).document
    assert (counted["waiting"], counted["sent"], counted["dead"]) == (1, 1, 3)
    assert counted["dead_by_reason"] == {"exhausted": 1, "refused": 1, "expired": 1}
    for state, routing_key in (("waiting", "order.later"), ("sent", "order.created")):
        [listed] = (await command.run("messages", "list", "--state", state, "--json")).document["messages"]
        assert (listed["state"], listed["message"]["routing_key"]) == (state, routing_key)
    for reason, routing_key in (("exhausted", "order.unlucky"), ("refused", "order.malformed")):
        said = (await command.run("dead-letters", "list", "--reason", reason)).stdout
        assert routing_key in said
        assert "order.late" not in said


async def test_the_errors_of_invalid_events_can_be_reviewed(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink) as sent:
        [letter] = await service.dead_letters.list(reason=Reason.REFUSED, limit=10)
    assert letter.message.routing_key == "order.malformed"
    assert letter.error.endswith("it answered 422 Unprocessable Entity: no such field")
    assert letter.message.created_at == sent["order.malformed"].created_at
    assert letter.died_at > letter.message.created_at - timedelta(minutes=1)  # by the clock of the database


async def test_every_end_tells_how_often_it_was_tried_and_why_it_failed(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox()
    async with one_of_each(service, sink):
        letters = {letter.reason: letter for letter in await service.dead_letters.list()}
    attempts = {reason.value: letter.attempt_count for reason, letter in letters.items()}
    assert attempts == {"exhausted": 3, "refused": 1, "expired": 0}
    assert letters[Reason.EXHAUSTED].history.count("it answered 503 Service Unavailable") == 3
    assert "it answered 422 Unprocessable" in letters[Reason.REFUSED].history
    assert "its expiration passed" in letters[Reason.EXPIRED].history
