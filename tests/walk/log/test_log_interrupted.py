"""Whatever is interrupted between a commit and the confirmed position, no message is lost and none stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Message, Outbox
from outbox.core.transport import Features, Published, Report, Transport, unreported
from outbox.stores.postgresql.wal.connection import ReplicationConnection, as_position
from outbox.stores.postgresql.wal.table import LoggedTable
from outbox.testing.servers import PostgreSQL

from .conftest import Place
from .hidden_commits import hidden_commit


async def confirmed(outbox: Outbox) -> int:
    status = await outbox.wal.status()
    return as_position(status.confirmed or "0/0")


async def test_no_position_is_confirmed_before_the_row_is_deleted(
    outbox: Outbox, make: Any, emit: Any, place: Place, rows: Any, until_empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the publish and before the deletion: it is sent again."""
    await emit("first")
    async with outbox.running(relay=True):
        await place.until(1)
        await until_empty()
    before = await confirmed(outbox)
    tried = asyncio.Event()

    async def away(self: LoggedTable, ids: object) -> Any:
        tried.set()
        raise OSError("the database is away")

    monkeypatch.setattr(LoggedTable, "done", away)
    monkeypatch.setattr(ReplicationConnection, "end", _nothing)
    running = asyncio.create_task(_relay(make(grace=0.5)))
    await emit("second")
    await place.until(2)
    await tried.wait()
    await asyncio.sleep(1.5)  # the server is told positions meanwhile
    assert await rows() == 1
    at_commit = await _position(outbox)
    assert before <= await confirmed(outbox) < at_commit
    running.cancel()
    await asyncio.wait([running])
    monkeypatch.undo()
    async with outbox.running(relay=True):
        assert await place.until(3) == ["first", "second", "second"]
        await until_empty()


async def test_what_was_deleted_and_not_confirmed_is_not_sent_again(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the deletion and before the position was confirmed."""
    monkeypatch.setattr(ReplicationConnection, "send", lambda *args, **options: None)
    monkeypatch.setattr(ReplicationConnection, "end", _nothing)
    before = await confirmed(outbox)
    async with outbox.running(relay=True):
        await emit("first", "second")
        await emit("third")
        await place.until(3)
        await until_empty()
    assert await confirmed(outbox) == before
    monkeypatch.undo()
    async with outbox.running(relay=True):
        await emit("fourth")
        assert await place.until(4) == ["first", "second", "third", "fourth"]
        await until_empty()
    assert place.bodies == ["first", "second", "third", "fourth"]
    assert await confirmed(outbox) > before


async def test_a_message_with_the_row_id_of_a_settled_one_is_not_taken_for_it(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRUNCATE … RESTART IDENTITY, or an id by hand, between a deletion and the confirmed position."""
    monkeypatch.setattr(ReplicationConnection, "send", lambda *args, **options: None)
    monkeypatch.setattr(ReplicationConnection, "end", _nothing)
    async with outbox.running(relay=True):
        await emit("first")
        await place.until(1)
        await until_empty()
    monkeypatch.undo()
    async with outbox.transaction() as session:
        await session.execute(text(f"TRUNCATE {outbox.tables.messages.fullname} RESTART IDENTITY"))
    await emit("second")
    async with outbox.running(relay=True):
        assert await place.until(2) == ["first", "second"]
        await until_empty()


async def test_what_was_put_off_and_not_confirmed_stays_with_the_table(
    outbox: Outbox, make: Any, emit: Any, place: Place, until_empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplicationConnection, "send", lambda *args, **options: None)
    monkeypatch.setattr(ReplicationConnection, "end", _nothing)
    relay = make(relay_retry_delays=(2, 60))
    place.refused.add("refused")
    async with relay.running(relay=True):
        await emit("refused", "taken")
        await place.until(1)
        async with asyncio.timeout(10):
            while not [each for each in await outbox.messages() if each.attempt_count]:
                await asyncio.sleep(0.02)
    monkeypatch.undo()
    place.refused.clear()
    async with relay.running(relay=True):
        await emit("next")
        assert sorted(await place.until(3)) == ["next", "refused", "taken"]
        await until_empty()
    assert place.asked[:2] == ["refused", "taken"]
    assert sorted(place.asked[2:]) == ["next", "refused"]  # the retry may be due before the second relay has the slot


async def test_a_part_of_a_transaction_confirms_nothing(
    outbox: Outbox, make: Any, emit: Any, place: Place, until_empty: Any
) -> None:
    """A position within a transaction would have all of it sent again, and one behind it would lose the rest."""
    relay = make(batch_size=2)
    await emit("before")
    async with relay.running(relay=True):
        await place.until(1)
        await until_empty()
    before = await confirmed(outbox)
    place.held = "3"
    running = asyncio.create_task(_relay(relay))
    await emit(*map(str, range(6)))
    await until_only(outbox, 1)  # a function is called for each message by itself: one that hangs holds up no other
    await asyncio.sleep(1.5)  # the server is told positions meanwhile
    assert await confirmed(outbox) == before
    place.release()
    assert await place.until(7) == ["before", "0", "1", "2", "4", "5", "3"]
    await until_empty()
    async with asyncio.timeout(10):
        while await confirmed(outbox) == before:
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])


class Batches(Transport):
    """A destination that answers to a batch as a whole, as a broker does. It holds back what it is told to."""

    name = "batches"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.lost = 0  # so many batches get no answer
        self.answer = asyncio.Event()

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        self.sent.append([message.body.decode() for message in messages])
        await self.answer.wait()
        if self.lost:
            self.lost -= 1
            return Published()
        return Published(frozenset(message.id for message in messages))


async def test_nothing_goes_out_before_what_was_committed_earlier_has_an_answer(
    outbox: Outbox, make: Any, emit: Any, until_empty: Any
) -> None:
    """A batch without an answer goes out again before all that was committed later."""
    batches = Batches()
    batches.lost = 2
    relay = make(transport=batches, batch_size=2, restart_delay=0.1)
    await outbox.store.maintenance.record_transport("batches", switch=True)
    async with relay.running(relay=True):
        for number in range(6):
            await emit(str(number))
        await asyncio.sleep(0.5)
        [first] = batches.sent
        batches.answer.set()
        await until_empty()
    assert first[0] == "0"
    flat = [body for batch in batches.sent for body in batch]
    assert list(dict.fromkeys(flat)) == [str(number) for number in range(6)]
    answered = batches.sent[2:]
    assert [body for batch in answered for body in batch] == [str(number) for number in range(6)]


async def until_only(outbox: Outbox, count: int) -> None:
    async with asyncio.timeout(10):
        while len(await outbox.messages()) != count:
            await asyncio.sleep(0.02)


@pytest.fixture
async def private(table_name: str, place: Place) -> AsyncIterator[tuple[PostgreSQL, Outbox]]:
    with PostgreSQL(settings={"synchronous_commit": "local"}) as server:
        url = server.url.replace("postgresql://", "postgresql+asyncpg://")
        outbox = Outbox(
            db_engine_url=url, table_name=table_name, transport=place.publish, relay_from="wal", poll_interval=0.2
        )
        await outbox.create_tables()
        await outbox.wal.create()
        yield server, outbox
        await outbox.close()


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_commit_that_others_do_not_see_yet_is_neither_lost_nor_left(
    private: tuple[PostgreSQL, Outbox], place: Place, is_running: bool
) -> None:
    """What the log tells may be younger than what statements see: absent is not deleted."""
    server, outbox = private

    async def commit() -> None:
        async with outbox.transaction() as session:
            await session.execute(text("SET LOCAL synchronous_commit = on"))
            await outbox.emit(session, "order.created", b"hidden")

    running = asyncio.create_task(_relay(outbox)) if is_running else None
    async with hidden_commit(server, commit) as show:
        running = running or asyncio.create_task(_relay(outbox))
        assert await place.until(1) == ["hidden"]
        await show()
        await until_only(outbox, 0)
        running.cancel()
        await asyncio.wait([running])
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", b"next")
        assert await place.until(2) == ["hidden", "next"]


async def _relay(outbox: Outbox) -> None:
    async with outbox.running(relay=True):
        await asyncio.Event().wait()


async def _position(outbox: Outbox) -> int:
    async with outbox.transaction() as session:
        return as_position(str(await session.scalar(text("SELECT pg_current_wal_insert_lsn()::text"))))


async def _nothing(*args: object, **options: object) -> None: ...
