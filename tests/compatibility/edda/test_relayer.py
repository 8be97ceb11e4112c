""" "Outbox Relayer Configuration", with "Max Age Timeout".

The rulings: a relay wakes up before its `poll_interval` is over if it is called. `batch_size` is larger by default, and
events are sent side by side. `max_age_hours` is `expiration`, and counts from when an event is due. A relayer is
started and stopped by `running()`, by `message_relay()`, or as `outbox relay`.
"""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from outbox import NEVER, Outbox, Reason
from outbox.core.attempt import Done, RetryIn
from outbox.core.events import CircuitOpened, Relayed, Started, Stopped
from outbox.outbound.relay import SIDE_BY_SIDE
from outbox.testing import advance
from outbox.transports.http import HttpTransport
from tests.compatibility.edda.orders import ORDER_CREATED, is_settled, send, states, walk
from tests.support.databases import on_every_store
from tests.support.http_sink import Behaviour, Connection, HttpSink, Request, answer, hang, status
from tests.support.observing import Recorder, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox
from tests.support.program import program

HOUR = timedelta(hours=1)


def once(gate: asyncio.Event) -> Behaviour:
    """Answers as soon as the gate is open."""

    async def behave(request: Request, connection: Connection) -> bool:
        await gate.wait()
        await connection.send(answer(200))
        return True

    return behave


# The options


def test_the_defaults() -> None:
    settings = Outbox(db_engine_url="sqlite+aiosqlite://", transport="http://localhost:8080/events").settings
    assert settings.seconds_between_looks == 1.0
    assert settings.batch_size == 500
    assert settings.expiration is None
    policy = settings.policy("relay_retry_delays")
    assert policy.delay(1_000_000, ConnectionError()) is not None  # there is no last attempt


def test_the_options_of_the_projects_relayer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In code, or in the environment."""
    url = "sqlite+aiosqlite:///orders.db"
    given = Outbox(
        db_engine_url=url,
        transport="http://localhost:8080/events",
        poll_interval=2.0,
        relay_retry_delays=(2, 2, 2, 2),
        batch_size=20,
        expiration=timedelta(hours=24),
    )
    for name, value in {
        "DB_ENGINE_URL": url,
        "TRANSPORT": "http://localhost:8080/events",
        "POLL_INTERVAL": "2.0",
        "RELAY_RETRY_DELAYS": "2,2,2,2",
        "BATCH_SIZE": "20",
        "EXPIRATION": "24h",
    }.items():
        monkeypatch.setenv(f"OUTBOX_{name}", value)
    for settings in (given.settings, Outbox().settings):
        policy = settings.policy("relay_retry_delays")
        assert (settings.db_engine_url, settings.transport) == (url, "http://localhost:8080/events")
        assert (settings.seconds_between_looks, settings.batch_size) == (2.0, 20)
        assert settings.duration("expiration") == timedelta(hours=24)
        assert [policy.delay(attempt, ConnectionError()) for attempt in (1, 4, 5)] == [
            timedelta(seconds=2),
            timedelta(seconds=2),
            None,
        ]


# Start and stop


@on_every_store
async def test_a_relayer_of_its_own_serves_the_storage_of_an_application(
    make_outbox: MakeOutbox, make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    """The application knows no broker. Nothing is sent before the start, or after the stop."""
    application = make_outbox(log=False)
    before = await send(application)
    async with make_http_outbox().running(relay=True):
        await eventually(lambda: is_settled(application))
    after = await send(application)
    assert len(recorder.of(Started)) == len(recorder.of(Stopped)) == 1
    assert sink.ids == [before.id]
    assert await states(application, after) == ["waiting"]
    async with make_http_outbox().running(relay=True):
        await eventually(lambda: is_settled(application))
    assert sink.ids == [before.id, after.id]


@on_every_store
async def test_a_relayer_that_is_stopped_finishes_what_it_has_begun(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service, gate = make_http_outbox(batch_size=1), asyncio.Event()
    sink.behave(once(gate))
    async with service.transaction() as session:
        messages = await service.emit_many(session, ORDER_CREATED, range(3))
    async with service.running(relay=True):
        await sink.until(1)
        asyncio.get_running_loop().call_later(0.1, gate.set)
    found = await states(service, *messages)
    assert sorted(found) == ["sent"] * len(sink.requests) + ["waiting"] * (3 - len(sink.requests))
    assert (await service.backlog()).leased == 0


RELAYER = """
    import asyncio
    import sys

    from outbox import NEVER, Outbox

    print("ready")
    relayer = Outbox(db_engine_url=sys.argv[1], table_name=sys.argv[2], transport=sys.argv[3], clean_up_after=NEVER)
    asyncio.run(relayer.message_relay())
"""


@on_every_store
async def test_a_relayer_in_a_process_of_its_own_stops_at_a_signal(
    make_outbox: MakeOutbox, sink: HttpSink, database_url: str, table_name: str
) -> None:
    application = make_outbox(log=False, clean_up_after=NEVER)
    sent = await send(application)
    sink.behave(hang(0.3))
    async with program(RELAYER, database_url, table_name, f"{sink.url}/events") as relayer:
        await sink.until(1)
        relayer.signal(signal.SIGTERM)
        code, _, complaints = await relayer.end()
    assert (code, "Traceback" in complaints) == (0, False)
    assert await states(application, sent) == ["sent"]
    assert sink.ids == [sent.id]


@on_every_store
async def test_what_a_killed_relayer_was_sending_is_sent_by_the_next_one(
    make_outbox: MakeOutbox, make_http_outbox: MakeOutbox, sink: HttpSink, database_url: str, table_name: str
) -> None:
    """Nobody knows whether it arrived, so it comes again, with the same id."""
    application = make_outbox(log=False)
    sent = await send(application)
    sink.behave(hang(), times=1)
    async with program(RELAYER, database_url, table_name, f"{sink.url}/events") as relayer:
        await sink.until(1)
        relayer.signal(signal.SIGKILL)
        await relayer.end()
    assert await states(application, sent) == ["waiting"]
    await let_leases_run_out(application)
    async with make_http_outbox().running(relay=True):
        await eventually(lambda: is_settled(application))
    assert sink.ids == [sent.id] * 2
    found = await walk(application, sent)
    assert (found.state, found.attempt_count, found.crash_count) == ("sent", 1, 1)


# poll_interval


@on_every_store
async def test_what_nobody_told_the_relayer_of_is_found_at_its_next_look(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox(poll_interval=0.1)
    async with service.running(relay=True):
        sent = await send(service, eta=HOUR)
        messages = service.tables.messages
        async with service.engines.asynchronous.begin() as connection:  # a commit that the library does not see
            await connection.execute(update(messages).values(due_at=datetime.now(UTC) - HOUR))
        await eventually(lambda: is_settled(service))
    assert sink.ids == [sent.id]


@on_every_store
async def test_a_commit_is_not_waited_for_until_the_next_look(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox(poll_interval=3600)
    async with service.running(relay=True):
        for count in (1, 2, 3):
            await send(service)
            await sink.until(count)


# batch_size


@on_every_store
async def test_a_batch_holds_no_more_events_than_it_may(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service, gate = make_http_outbox(batch_size=3), asyncio.Event()
    sink.behave(once(gate))
    async with service.transaction() as session:
        await service.emit_many(session, ORDER_CREATED, range(20))
    in_flight = 3 * SIDE_BY_SIDE  # while none of them is answered
    async with service.running(relay=True):
        await sink.until(in_flight)
        backlog = await service.backlog()
        assert (backlog.leased, backlog.waiting, len(sink.requests)) == (in_flight, 20, in_flight)
        gate.set()
        await eventually(lambda: is_settled(service))
    assert len(sink.requests) == 20


@on_every_store
async def test_events_of_a_batch_are_sent_side_by_side_as_far_as_the_broker_should_bear_it(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    """The project sends one after the other, which is a concurrency of one."""
    for concurrency in (1, 4):
        gate, before = asyncio.Event(), len(sink.requests)
        sink.most_at_once = 0
        sink.behave(once(gate))
        service = make_http_outbox(transport=HttpTransport(f"{sink.url}/events", concurrency=concurrency))
        async with service.transaction() as session:
            await service.emit_many(session, ORDER_CREATED, range(12))
        async with service.running(relay=True):
            await sink.until(before + concurrency)
            gate.set()
            await sink.until(before + 12)
        assert sink.most_at_once == concurrency


# max_age_hours


@on_every_store
async def test_by_default_no_event_is_too_old(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    sent = await send(service)
    await advance(service, timedelta(days=365))
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    assert sink.ids == [sent.id]


@on_every_store
async def test_an_event_that_is_too_old_is_expired_and_never_sent(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox(expiration=HOUR)
    old = await send(service)
    await advance(service, HOUR)
    young = await send(service)
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    assert sink.ids == [young.id]
    [letter] = await service.dead_letters.list(reason=Reason.EXPIRED)
    assert (letter.message.id, letter.attempt_count) == (old.id, 0)


@on_every_store
async def test_an_event_may_have_an_age_of_its_own(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    """A flash sale of a quarter of an hour, among events that are worth sending for a day."""
    service = make_http_outbox(expiration=24 * HOUR)
    offer = await send(service, "offer.started", expiration=timedelta(minutes=15))
    order = await send(service)
    await advance(service, HOUR)
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    assert await states(service, offer, order) == ["expired", "sent"]
    assert sink.requests[0].json["expirytime"] > order.created_at.isoformat()


@on_every_store
async def test_an_event_for_later_is_not_too_old_when_its_time_comes(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    """The project counts from when an event was written."""
    service = make_http_outbox(expiration=HOUR)
    sent = await send(service, eta=24 * HOUR)
    await advance(service, 24 * HOUR + timedelta(minutes=1))
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    assert await states(service, sent) == ["sent"]


@on_every_store
async def test_an_event_that_becomes_too_old_between_two_attempts_is_not_retried(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    service = make_http_outbox(expiration=HOUR, relay_retry_delays=(1800,) * 10)
    sink.behave(status(503))
    sent = await send(service)
    async with service.running(relay=True):
        await recorder.wait_for(Relayed)
    await advance(service, HOUR)
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.reason, found.attempt_count, len(sink.requests)) == ("expired", 1, 1)
    assert "503" in found.history


@on_every_store
async def test_events_become_too_old_while_the_broker_is_away(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    """And only those: the others wait for it."""
    service = make_http_outbox(poll_interval=0.05)
    await sink.stop()
    async with service.running(relay=True):
        brief = await send(service, expiration=HOUR)
        patient = await send(service)
        await recorder.wait_for(CircuitOpened)
        await advance(service, HOUR)
        await eventually(lambda: _are(service, [brief], "expired"))
        assert await states(service, patient) == ["waiting"]
        await sink.start()
        await eventually(lambda: is_settled(service))
    assert sink.ids == [patient.id]


async def _are(outbox: Outbox, messages: list[Any], state: str) -> bool:
    return await states(outbox, *messages) == [state] * len(messages)


# All of them together


@on_every_store
async def test_two_relayers_of_one_table_may_be_configured_differently(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    """What each does with a failure is its own affair."""
    patient = make_http_outbox(relay_retry_delays=(3600,) * 3)
    sink.behave(status(500), times=1)
    async with patient.running(relay=True):
        sent = await send(patient)
        [failed] = await recorder.wait_for(Relayed)
    assert isinstance(failed.outcome, RetryIn)
    await advance(patient, HOUR)
    async with make_http_outbox(relay_retry_delays=()).running(relay=True):
        _, done = await recorder.wait_for(Relayed, 2)
    assert isinstance(done.outcome, Done)
    assert await states(patient, sent) == ["sent"]
