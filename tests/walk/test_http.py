"""From a transaction to a server over HTTP: sent, retried, refused, and waiting while the server is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox import ConfigurationError, HeaderInvalid, Message, Outbox, Reason, listen
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.cloudevents import parse
from outbox.core.events import CircuitOpened, Relayed
from outbox.core.webhooks import Secrets, verify
from outbox.transports.http import HttpTransport
from tests.support.http_sink import HttpSink, by_type, hang, redirect, reset, status
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

SECRET = "whsec_" + "A" * 32


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    async with HttpSink() as sink:
        yield sink


@asynccontextmanager
async def relaying(make_outbox: MakeOutbox, transport: Any, **options: Any) -> AsyncIterator[tuple[Outbox, Recorder]]:
    recorder = Recorder()
    outbox = make_outbox(transport=transport, observers=[recorder], **options)
    async with outbox.running(relay=True):
        yield outbox, recorder


async def emit(outbox: Outbox, routing_key: str = "order.created", body: Any = None, **options: Any) -> Message:
    async with outbox.transaction() as session:
        message = await outbox.emit(session, routing_key, body or {"id": 1}, **options)
    assert message is not None
    return message


async def drained(outbox: Outbox) -> None:
    await eventually(lambda: _is_empty(outbox))


async def _is_empty(outbox: Outbox) -> bool:
    return not await outbox.messages()


async def test_a_committed_message_is_posted_signed_as_a_cloud_event(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    async with relaying(make_outbox, f"{sink.url}/events", webhook_secrets=SECRET, source="/shop") as (outbox, _):
        sent = await emit(outbox, key="7", headers={"tenant": "acme"})
        await drained(outbox)
    [request] = sink.requests
    [received] = parse(request.headers, request.body)
    assert received.source == "/shop"
    assert received.message.headers == {"tenant": "acme", "ce-source": "/shop"}
    assert (received.message.id, received.message.body, received.message.key) == (sent.id, sent.body, "7")
    assert verify(Secrets(SECRET), request.headers, request.body, datetime.now(UTC).timestamp()) == sent.id


async def test_what_is_rolled_back_is_never_posted(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    async with relaying(make_outbox, sink.url) as (outbox, _):
        with pytest.raises(ZeroDivisionError):
            async with outbox.transaction() as session:
                await outbox.emit(session, "order.created", {"id": 1})
                raise ZeroDivisionError
        sent = await emit(outbox)
        await drained(outbox)
    assert sink.ids == [sent.id]


@pytest.mark.parametrize("code", [400, 404, 410, 422])
async def test_an_answer_that_means_never_makes_a_dead_letter(
    make_outbox: MakeOutbox, sink: HttpSink, code: int
) -> None:
    sink.behave(status(code, body=b"unknown order"))
    async with relaying(make_outbox, sink.url) as (outbox, recorder):
        await emit(outbox)
        [relayed] = await recorder.wait_for(Relayed)
        [letter] = await outbox.dead_letters.list()
    assert isinstance(relayed.outcome, Dead)
    assert (letter.reason, letter.attempt_count) == (Reason.REFUSED, 1)
    assert f"{code}" in letter.error
    assert "unknown order" in letter.error
    assert len(sink.requests) == 1


async def test_a_redirect_to_this_machine_makes_a_dead_letter(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    async with HttpSink() as inside:
        sink.behave(redirect(f"{inside.url}/admin"))
        async with relaying(make_outbox, sink.url) as (outbox, recorder):
            await emit(outbox)
            await recorder.wait_for(Relayed)
            [letter] = await outbox.dead_letters.list()
        assert inside.connections == 0
    assert letter.reason is Reason.REFUSED


@pytest.mark.parametrize("code", [408, 425, 429, 500, 503])
async def test_an_answer_that_means_not_now_is_retried_with_the_same_id(
    make_outbox: MakeOutbox, sink: HttpSink, code: int
) -> None:
    sink.behave(status(code), times=2)
    async with relaying(make_outbox, sink.url, relay_retry_delays=(0.01, 0.01), webhook_secrets=SECRET) as (
        outbox,
        recorder,
    ):
        sent = await emit(outbox)
        await recorder.wait_for(Relayed, 3)
        await drained(outbox)
    assert sink.ids == [sent.id] * 3
    assert {request.headers["webhook-id"] for request in sink.requests} == {sent.id}
    assert [type(each.outcome) for each in recorder.of(Relayed)] == [RetryIn, RetryIn, Done]


async def test_used_up_attempts_make_a_dead_letter_and_a_replay_keeps_the_id(
    make_outbox: MakeOutbox, sink: HttpSink
) -> None:
    sink.behave(status(500), times=2)
    async with relaying(make_outbox, sink.url, relay_retry_delays=(0.01,), webhook_secrets=SECRET) as (
        outbox,
        recorder,
    ):
        sent = await emit(outbox)
        await recorder.wait_for(Relayed, 2)
        [letter] = await outbox.dead_letters.list()
        assert (letter.reason, letter.attempt_count) == (Reason.EXHAUSTED, 2)
        await outbox.dead_letters.replay([letter.id])
        await recorder.wait_for(Relayed, 3)
        await drained(outbox)
    assert {request.headers["webhook-id"] for request in sink.requests} == {sent.id}


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [("120", 120, 120), ("86400", 3600, 3600), ("0", 5, 5), ("soon", 5, 5)],
)
async def test_a_retry_after_is_honoured_up_to_an_hour(
    make_outbox: MakeOutbox, sink: HttpSink, asked: str, least: float, most: float
) -> None:
    sink.behave(status(429, {"retry-after": asked}))
    async with relaying(make_outbox, sink.url, relay_retry_delays=(5, 5)) as (outbox, recorder):
        await emit(outbox)
        [relayed] = await recorder.wait_for(Relayed)
    assert isinstance(relayed.outcome, RetryIn)
    assert timedelta(seconds=least) <= relayed.outcome.delay <= timedelta(seconds=most)


async def test_an_outage_burns_no_attempt(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    await sink.stop()
    async with relaying(make_outbox, sink.url, relay_retry_delays=()) as (outbox, recorder):
        sent = [await emit(outbox) for _ in range(5)]
        await recorder.wait_for(CircuitOpened, 2)
        assert {each.attempt_count for each in await outbox.messages()} == {0}
        await sink.start()
        await drained(outbox)
        assert await outbox.dead_letters.list() == []
    assert set(sink.ids) == {each.id for each in sent}
    assert {each.attempt.attempt_count for each in recorder.of(Relayed)} == {1}


async def test_a_message_that_its_server_drops_while_it_answers_others_is_not_tried_for_ever(
    make_outbox: MakeOutbox, sink: HttpSink
) -> None:
    sink.behave(by_type({"poison": reset()}))
    transport = HttpTransport(sink.url)
    outbox = make_outbox(transport=transport, relay_retry_delays=(), log=False)
    async with outbox.transaction() as session:
        await outbox.emit(session, "poison", 1)
        await outbox.emit_many(session, "order.created", range(20))
    async with outbox.running(relay=True):
        letters = await eventually(outbox.dead_letters.list)
        await drained(outbox)
    assert [(letter.message.routing_key, letter.reason) for letter in letters] == [("poison", Reason.EXHAUSTED)]


async def test_a_slow_answer_is_waited_for(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    sink.behave(hang(1.0), times=1)
    async with relaying(make_outbox, sink.url) as (outbox, _):
        sent = await emit(outbox)
        await drained(outbox)
    assert sink.ids == [sent.id]


async def test_a_relay_that_is_stopped_finishes_what_it_has_begun(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    sink.behave(hang(0.5))
    async with relaying(make_outbox, sink.url) as (outbox, _):
        await emit(outbox)
        await sink.until(1)
    assert await outbox.messages() == []
    assert len(sink.requests) == 1


# The source.


async def test_all_processes_of_a_table_say_the_same_source(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    for _ in range(2):
        async with relaying(make_outbox, sink.url) as (outbox, _):
            await emit(outbox)
            await drained(outbox)
    sources = {request.json["source"] for request in sink.requests}
    database = outbox.engines.main.url.database or ""
    assert sources == {f"/{database.rpartition('/')[2]}/{outbox.settings.table_name}"}


async def test_a_message_may_have_a_source_of_its_own(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    async with relaying(make_outbox, sink.url, source="/shop") as (outbox, _):
        await emit(outbox, source="https://shop.example/orders")
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", [1, 2], source="/imports")
        await drained(outbox)
    assert sorted(request.json["source"] for request in sink.requests) == [
        "/imports",
        "/imports",
        "https://shop.example/orders",
    ]
    assert not [request for request in sink.requests if "outboxheaders" in request.json]


@pytest.mark.parametrize("given", [{"source": ""}, {"source": "/a", "headers": {"ce-source": "/b"}}, {"source": 7}])
async def test_a_source_that_says_nothing_or_two_things_is_refused(outbox: Outbox, given: Any) -> None:
    async with outbox.transaction() as session:
        with pytest.raises(HeaderInvalid):
            await outbox.emit(session, "order.created", 1, **given)


# Receiving.


async def test_a_worker_is_told_about_http_app(make_outbox: MakeOutbox, sink: HttpSink) -> None:
    @listen("#", queue="q")
    async def listener(body: object) -> None: ...

    with pytest.raises(ConfigurationError, match="http_app"):
        async with make_outbox(transport=sink.url).running(listeners=[listener]):
            await asyncio.sleep(0)
    assert sink.connections == 0
