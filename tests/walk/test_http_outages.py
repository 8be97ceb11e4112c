"""Servers that go away, hang and come back, over real connections: who waits, who does not, and what it costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Integer, Text, cast, update

from outbox import Outbox, Reason
from outbox.core.events import CircuitClosed, CircuitOpened
from outbox.core.store import CircuitState
from outbox.outbound import circuit
from outbox.transports.http import HttpTransport
from tests.support.databases import either_feed
from tests.support.http_sink import HttpSink, by_type, hang, reset, status
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    async with HttpSink() as sink:
        yield sink


@pytest.fixture
async def other() -> AsyncIterator[HttpSink]:
    async with HttpSink() as sink:
        yield sink


@pytest.fixture(autouse=True)
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "SHORTEST", 0.1)
    monkeypatch.setattr(circuit, "LONGEST", 0.8)


async def emit(outbox: Outbox, count: int, routing_key: str = "order.created", **options: Any) -> list[str]:
    async with outbox.transaction() as session:
        return [message.id for message in await outbox.emit_many(session, routing_key, range(count), **options)]


async def empty(outbox: Outbox) -> bool:
    return not await outbox.messages()


@either_feed
@pytest.mark.parametrize("how", ["refused", "reset", "hanging"])
async def test_an_outage_burns_nothing_and_everything_arrives_when_it_is_over(
    make_outbox: MakeOutbox, sink: HttpSink, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.WARNING, "outbox")
    recorder = Recorder()
    transport = HttpTransport(sink.url, timeout=0.3)
    options = {"transport": transport, "relay_retry_delays": (), "observers": [recorder], "batch_size": 20}
    first, second = make_outbox(**options), make_outbox(**options | {"transport": HttpTransport(sink.url, timeout=0.3)})
    if how == "refused":
        await sink.stop()
    else:
        sink.behave(reset() if how == "reset" else hang())
    async with first.running(relay=True), second.running(relay=True):
        sent = await emit(first, 60)
        await recorder.wait_for(CircuitOpened, 5)
        assert {(each.attempt_count, each.crash_count) for each in await first.messages()} == {(0, 0)}
        [found] = (await first.backlog()).circuits
        assert (found.destination, found.state is CircuitState.CLOSED) == (None, False)
        assert found.error.startswith("http confirmed nothing of ")
        before = len(sink.requests)
        sink.behave(status(200))
        if how == "refused":
            await sink.start()
        await eventually(lambda: empty(first))
        await eventually(lambda: any(record.levelname == "WARNING" for record in caplog.records))
    assert set(sink.ids[before:]) >= set(sent)
    assert recorder.of(CircuitClosed)
    # Each of the two relays has a line for the beginning if it tried, and one for the end if it sent something then.
    levels = [record.levelname for record in caplog.records if record.name == "outbox"]
    assert levels[0] == "ERROR" and 1 <= levels.count("WARNING") <= levels.count("ERROR") <= 2
    assert (await first.backlog()).dead == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_cannot_be_written_as_a_request_dies_and_closes_no_circuit(
    make_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    transport = HttpTransport(sink.url, mode="binary", timeout=0.3)
    outbox = make_outbox(transport=transport, observers=[recorder])
    await outbox.create_tables()
    await sink.stop()
    table = outbox.tables.messages
    async with outbox.running(relay=True):
        await emit(outbox, 1)
        await recorder.wait_for(CircuitOpened, 1)
        sent = await emit(outbox, 25)
        async with outbox.transaction() as session:
            odd = update(table).where(table.c.body != b"0", as_integer(table.c.body) < 6)
            await session.execute(odd.values(content_type="text/kr\u00e4ftig", due_at=table.c.created_at))
        await eventually(lambda: dead(outbox, 5))
        assert not recorder.of(CircuitClosed)
        assert {letter.reason for letter in await outbox.dead_letters.list()} == {Reason.REFUSED}
        await sink.start()
        await eventually(lambda: empty(outbox))
    assert len({*sink.ids} & {*sent}) == 20


async def dead(outbox: Outbox, count: int) -> bool:
    return (await outbox.backlog()).dead == count


def as_integer(body: ColumnElement[bytes]) -> ColumnElement[int]:
    return cast(cast(body, Text), Integer)


@either_feed
async def test_of_two_routes_one_server_is_away_and_the_other_gets_everything(
    make_outbox: MakeOutbox, sink: HttpSink, other: HttpSink
) -> None:
    routes = {"order.*": f"{sink.url}/orders?token=secret", "#": f"{other.url}/all"}
    outbox = make_outbox(routes=routes, batch_size=10)
    await sink.stop()
    async with outbox.running(relay=True):
        sent = await emit(outbox, 50)
        await other.until(50)
        await eventually(lambda: _none_left(outbox, f"{other.url}/all"))
        backlog = await outbox.backlog()
        assert {queue.queue: queue.queued for queue in backlog.queues} == {
            f"{sink.url}/orders": 50,
            f"{other.url}/all": 0,
        }
        [found] = backlog.circuits
        assert (found.destination, found.state is CircuitState.CLOSED) == (f"{sink.url}/orders", False)
        await sink.start()
        await eventually(lambda: empty(outbox))
    assert sorted(sink.ids) == sorted(other.ids) == sorted(sent)
    assert {request.path for request in sink.requests} == {"/orders?token=secret"}


async def _none_left(outbox: Outbox, queue: str) -> bool:
    return not await outbox.messages(queue=queue)


@either_feed
async def test_one_message_that_hangs_its_server_does_not_stop_the_others(
    make_outbox: MakeOutbox, sink: HttpSink
) -> None:
    sink.behave(by_type({"order.hanging": hang()}))
    outbox = make_outbox(transport=HttpTransport(sink.url, timeout=0.3), relay_retry_delays=(60,))
    async with outbox.running(relay=True):
        await emit(outbox, 1, "order.hanging")
        await sink.until(1)
        sent = await emit(outbox, 20)
        await eventually(lambda: set(sink.ids) >= set(sent))


@either_feed
async def test_what_expires_while_a_server_is_away_is_dead(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    await sink.stop()
    recorder = Recorder()
    outbox = make_outbox(transport=sink.url, observers=[recorder], poll_interval=0.05)
    async with outbox.running(relay=True):
        await emit(outbox, 3, expiration=0.5)
        await recorder.wait_for(CircuitOpened)
        await eventually(lambda: _dead(outbox, {"expired": 3}))


async def _dead(outbox: Outbox, reasons: dict[str, int]) -> bool:
    await asyncio.sleep(0.02)
    return dict((await outbox.backlog()).dead_by_reason) == reasons
