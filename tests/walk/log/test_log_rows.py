"""What the log tells of a row is what a claim would have read from the table."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from outbox import Message, Outbox
from outbox.core.attempt import Attempt
from outbox.core.message import NOW
from outbox.core.store import Selection
from outbox.stores.postgresql.wal.inserted_row import InsertedRow
from outbox.stores.postgresql.wal.pgoutput import Insert, PgoutputDecoder
from outbox.testing.publishing_contract import AT_THE_LIMITS

TEXT = st.text(st.characters(blacklist_categories=["C"]), min_size=1, max_size=20)
FIELDS = st.fixed_dictionaries(
    {"body": st.binary(max_size=300)},
    optional={
        "key": TEXT,
        "headers": st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,9}", fullmatch=True), TEXT, max_size=3),
        "routing_key": TEXT,
        "content_type": st.sampled_from(["text/plain", "application/octet-stream"]),
        "expiration": st.sampled_from([60, 0.5]),
    },
)


async def in_log(outbox: Outbox, *, binary: bool) -> list[InsertedRow]:
    """What the slot has, as the decoder reads it."""
    options = ["proto_version", "1", "publication_names", outbox.wal.name, *(["binary", "true"] if binary else [])]
    listed = ", ".join(f"'{each}'" for each in options)
    async with outbox.transaction() as session:
        for setting in ("DateStyle = ISO", "TimeZone = UTC", "bytea_output = hex"):
            await session.execute(text(f"SET LOCAL {setting}"))
        peek = f"SELECT data FROM pg_logical_slot_peek_binary_changes('{outbox.wal.name}', NULL, NULL, {listed})"
        frames = (await session.execute(text(peek))).scalars().all()
    decoder = PgoutputDecoder()
    decoded = [decoder.decode(bytes(frame)) for frame in frames]
    return [InsertedRow.of(each) for each in decoded if isinstance(each, Insert)]


async def in_table(outbox: Outbox) -> list[Attempt]:
    async with outbox.store.feed.claim(Selection(limit=10_000, lease=timedelta(seconds=60))) as claim:
        return list(claim.attempts)


async def empty(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await session.execute(text(f"DELETE FROM {outbox.tables.messages.fullname}"))
    async with outbox.transaction() as session:
        advance = f"SELECT pg_replication_slot_advance('{outbox.wal.name}', pg_current_wal_lsn())"
        await session.execute(text(advance))


async def check(outbox: Outbox) -> None:
    """The attempts of both, in both of the forms in which the server writes values."""
    attempts = {attempt.id: attempt for attempt in await in_table(outbox)}
    assert attempts
    for binary in (True, False):
        rows = await in_log(outbox, binary=binary)
        assert {row.id: row.attempt for row in rows} == attempts
        assert all(row.dead is None and row.is_fresh for row in rows)


@pytest.mark.parametrize("fields", AT_THE_LIMITS.values(), ids=AT_THE_LIMITS)
async def test_messages_at_their_limits(outbox: Outbox, fields: dict[str, Any]) -> None:
    given = {"routing_key": "order.created", "body": b"{}", **fields}
    for name in ("created_at", "due_at", "tracking_ids", "expires_at"):
        given.pop(name, None)
    message = Message(**{"routing_key": "order.created", "body": b"{}", **fields})
    async with outbox.transaction() as session:
        await outbox.emit(session, given.pop("routing_key"), given.pop("body"), **given)
        insert, rows = outbox.store.writing.insert([message], NOW)
        await session.execute(insert, rows)
    await check(outbox)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(emitted=st.lists(FIELDS, min_size=1, max_size=8))
async def test_whatever_is_emitted(outbox: Outbox, emitted: list[dict[str, Any]]) -> None:
    async with outbox.transaction() as session:
        for fields in emitted:
            routing_key, body = fields.get("routing_key", "order.created"), fields["body"]
            others = {name: value for name, value in fields.items() if name not in ("routing_key", "body")}
            try:
                async with session.begin_nested():
                    await outbox.emit(session, routing_key, body, **others)
            except ValueError:
                continue
        await outbox.emit(session, "order.created", b"one at least")
    await check(outbox)
    await empty(outbox)


@pytest.mark.parametrize(
    ("column", "value", "dead"),
    [
        ("created_at", "'infinity'", True),
        ("created_at", "'4000-01-01 BC'", True),
        ("due_at", "'-infinity'", False),
        ("expires_at", "'infinity'", False),
        ("expires_at", "'20000-01-01'", False),
        ("attempts", "-1", True),
        ("headers", "'no json'", True),
        ("tracking_ids", "'{}'", True),
        ("message_id", "repeat('é', 200)", True),
        ("key", "E'a\\nb'", False),
    ],
)
async def test_rows_of_another_program(outbox: Outbox, column: str, value: str, dead: bool) -> None:
    table = outbox.tables.messages.fullname
    columns = {
        "created_at": "now()",
        "due_at": "now()",
        "message_id": "'x'",
        "routing_key": "'order.created'",
        "content_type": "'text/plain'",
        "body": "'x'",
        column: value,
    }
    async with outbox.transaction() as session:
        await session.execute(
            text(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(columns.values())})")
        )
    attempts = {attempt.id: attempt for attempt in await in_table(outbox)}
    for binary in (True, False):
        [row] = await in_log(outbox, binary=binary)
        assert (row.dead is not None) is dead
        assert dead or attempts[row.id] == row.attempt


async def test_a_row_with_its_queue_or_that_is_done_is_not_for_a_relay(outbox: Outbox) -> None:
    table = outbox.tables.messages.fullname
    async with outbox.transaction() as session:
        for column, value in (("destination", "'q'"), ("done_at", "now()"), ("first_due_at", "now()")):
            columns = f"created_at, due_at, message_id, routing_key, content_type, body, {column}"
            values = f"now(), now(), 'x', 'order.created', 'text/plain', 'x', {value}"
            await session.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({values})"))
    assert [row.is_fresh for row in await in_log(outbox, binary=True)] == [False, False, False]
