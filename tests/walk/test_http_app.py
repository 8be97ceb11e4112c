"""http_app(): what others send over HTTP is stored first, answered then, and handled once."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import create_async_engine

import outbox as library
from outbox import NEVER, ConfigurationError, Listener, Message, Outbox
from outbox.core.cloudevents_json import MOST_EVENTS
from outbox.core.events import Advised, Received, RequestDeclined, Troubled
from outbox.inbound.http.app import HttpApp
from outbox.testing.draining import drain
from outbox.transports.memory import MemoryTransport
from tests.support.databases import on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.sending import (
    BATCHED,
    STRUCTURED,
    Answered,
    Sender,
    answer,
    attributes,
    batched,
    binary,
    head,
    serving,
    signed,
    structured,
    webhook,
)

from .certificates import make_certificates

Arrivals = asyncio.Queue[tuple[Any, Message]]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
SHORT = 0.5  # seconds for requests that are to take too long


@pytest.fixture
def outbox(make_outbox: MakeOutbox, recorder: Recorder) -> Outbox:
    return make_outbox(observers=[recorder])


@pytest.fixture
async def sender(outbox: Outbox, listener: Listener) -> AsyncIterator[Sender]:
    """To an application that asks for no signatures."""
    async with serving(outbox.http_app([listener], secrets=None)) as sender:
        yield sender


async def nothing_is_stored(outbox: Outbox, arrivals: Arrivals) -> None:
    assert await outbox.messages() == []
    assert await outbox.dead_letters.list() == []
    assert arrivals.empty()


@asynccontextmanager
async def held(outbox: Outbox) -> AsyncIterator[None]:
    """While this is open, nothing can be stored."""
    inbox = outbox.tables.inbox
    async with outbox.transaction() as session:
        if "sqlite" in str(outbox.engines.main.url):
            await session.execute(delete(inbox).where(inbox.c.queue == "nothing"))
        else:
            await session.execute(text(f"LOCK TABLE {inbox.name} IN EXCLUSIVE MODE"))
        yield


# What is taken.


async def test_a_structured_event_reaches_its_listener_as_a_message(sender: Sender, arrivals: Arrivals) -> None:
    made = datetime(2026, 11, 1, 12, 30, tzinfo=UTC)
    answered = await sender.post(
        *structured({"total": 7}, subject="customer-7", time="2026-11-01T12:30:00Z", traceparent="00-abc-def-01")
    )
    assert (answered.status, answered.line) == (202, "")
    body, message = await arrival(arrivals)
    assert body == {"total": 7}
    assert (message.routing_key, message.key, message.created_at) == ("order.created", "customer-7", made)
    assert message.content_type == "application/json"
    assert message.headers["ce-source"] == "/shop"
    assert message.headers["traceparent"] == "00-abc-def-01"
    assert message.tracking_ids[-2] == "1", "the sender's own id leads to the message"


async def test_an_event_in_binary_mode_reaches_its_listener(sender: Sender, arrivals: Arrivals) -> None:
    assert (await sender.post(*binary({"total": 7}, subject="K%C3%B6ln"))).is_taken
    body, message = await arrival(arrivals)
    assert (body, message.routing_key, message.key) == ({"total": 7}, "order.created", "Köln")


async def test_events_in_a_batch_are_messages_of_their_own(sender: Sender, arrivals: Arrivals) -> None:
    assert (await sender.post(*batched(*(attributes(str(id), data=id) for id in range(20))))).is_taken
    assert {(await arrival(arrivals))[0] for _ in range(20)} == set(range(20))


async def test_a_batch_of_no_events_is_taken(sender: Sender, outbox: Outbox, arrivals: Arrivals) -> None:
    assert (await sender.post(*batched())).is_taken
    await nothing_is_stored(outbox, arrivals)


async def test_a_signed_webhook_that_is_no_event_is_routed_by_its_type(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    async with serving(outbox.http_app([listener], secrets=SECRET)) as sender:
        assert (await sender.post(*signed(webhook(b'{"type": "order.paid", "data": [1]}'), SECRET))).is_taken
        body, message = await arrival(arrivals)
    assert body == {"type": "order.paid", "data": [1]}
    assert (message.routing_key, message.body) == ("order.paid", b'{"type": "order.paid", "data": [1]}')
    assert (message.headers["webhook-id"], message.tracking_ids[0]) == ("msg_1", "msg_1")


async def test_a_webhook_whose_path_names_a_routing_key_is_routed_by_that(sender: Sender, arrivals: Arrivals) -> None:
    assert (await sender.post(*webhook(b'{"type": "something"}'), path="/order.paid")).is_taken
    assert (await arrival(arrivals))[1].routing_key == "order.paid"
    assert (await sender.post(*webhook(b"[1, 2]", "msg_2"), path="/order.list")).is_taken
    assert (await arrival(arrivals))[0] == [1, 2]


async def test_every_listener_whose_key_matches_gets_the_event(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    audits: asyncio.Queue[Any] = asyncio.Queue()
    audit = Listener("#", audits.put_nowait, queue="audit")
    async with serving(outbox.http_app([listener, audit], secrets=None)) as sender:
        assert (await sender.post(*batched(attributes("1", data=1), attributes("2", "parcel.sent", data=2)))).is_taken
        assert {await arrival(audits), await arrival(audits)} == {1, 2}
        assert (await arrival(arrivals))[0] == 1
    assert arrivals.empty()


async def test_any_of_the_secrets_verifies_and_so_they_can_be_changed(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=[SECRET, OTHER_SECRET])
    async with serving(app) as sender:
        for number, secret in enumerate((SECRET, OTHER_SECRET)):
            assert (await sender.post(*signed(structured(number, id=str(number)), secret))).is_taken
        assert {(await arrival(arrivals))[0] for _ in range(2)} == {0, 1}


# Once.


async def test_a_copy_is_taken_and_has_no_effect(sender: Sender, arrivals: Arrivals, recorder: Recorder) -> None:
    for _ in range(3):
        assert (await sender.post(*structured(1))).is_taken
    assert (await sender.post(*structured(2, id="2"))).is_taken
    assert {(await arrival(arrivals))[0], (await arrival(arrivals))[0]} == {1, 2}
    assert arrivals.empty()
    received = recorder.of(Received)
    assert (sum(each.stored for each in received), sum(each.duplicates for each in received)) == (2, 2)


async def test_of_copies_that_come_at_once_to_several_processes_one_is_stored(
    make_outbox: MakeOutbox, listener: Listener
) -> None:
    outboxes = [make_outbox() for _ in range(3)]
    await outboxes[0].create_tables()
    async with (
        serving(outboxes[0].http_app([listener], secrets=None), lifespan="off") as first,
        serving(outboxes[1].http_app([listener], secrets=None), lifespan="off") as second,
    ):
        copies = [batched(attributes("1"), attributes("2")), batched(attributes("2"), attributes("1"))]
        sending = [to.post(*copies[number % 2]) for number in range(10) for to in (first, second)]
        assert {each.status for each in await asyncio.gather(*sending)} == {202}
    assert sorted(each.message.tracking_ids[0] for each in await outboxes[2].messages()) == ["1", "2"]


async def test_equal_ids_of_two_sources_are_two_messages(
    sender: Sender, arrivals: Arrivals, recorder: Recorder
) -> None:
    for source in ("/shop", "/warehouse", "/shop"):
        assert (await sender.post(*structured(source, source=source))).is_taken
    assert [each.stored for each in recorder.of(Received)] == [1, 1, 0]
    assert {(await arrival(arrivals))[0], (await arrival(arrivals))[0]} == {"/shop", "/warehouse"}
    assert arrivals.empty()


async def test_equal_webhook_ids_at_two_endpoints_are_two_messages(sender: Sender, arrivals: Arrivals) -> None:
    for path in ("/order.made", "/order.paid", "/order.made"):
        assert (await sender.post(*webhook(b"{}"), path=path)).is_taken
    keys = {(await arrival(arrivals))[1].routing_key for _ in range(2)}
    assert keys == {"order.made", "order.paid"}
    assert arrivals.empty()


async def test_more_slashes_make_no_copy_new(
    outbox: Outbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    async with serving(outbox.http_app([listener], secrets=SECRET)) as sender:
        for id, path in (("msg_1", "{}"), ("msg_2", "{}order.paid")):
            request = signed(webhook(b'{"type": "order.sent"}'), SECRET, id=id)
            for slashes in ("/", "//", "/%2F", "/"):
                assert (await sender.post(*request, path=path.format(slashes))).is_taken
    assert sum(each.stored for each in recorder.of(Received)) == 2
    assert sorted(each.routing_key for _, each in (await arrival(arrivals), await arrival(arrivals))) == [
        "order.paid",
        "order.sent",
    ]
    assert arrivals.empty()


async def test_an_id_of_any_length_is_known_again(sender: Sender, arrivals: Arrivals, recorder: Recorder) -> None:
    long = {"id": "i" * 255, "source": "https://example.org/" + "s" * 2000}
    for _ in range(2):
        assert (await sender.post(*structured(1, **long))).is_taken
    assert len((await arrival(arrivals))[1].id) <= 255
    assert [(each.stored, each.duplicates) for each in recorder.of(Received)] == [(1, 0), (0, 1)]


# What is not taken: never a word of it is stored.


def changed(event: tuple[Any, bytes], **headers: str) -> tuple[dict[str, str], bytes]:
    given, body = event
    return {**given, **{name.replace("_", "-"): value for name, value in headers.items()}}, body


MALFORMED = {
    "no JSON": (STRUCTURED, b"{"),
    "not UTF-8": (STRUCTURED, b'{"id": "\xff"}'),
    "no event": (STRUCTURED, b"[]"),
    "no type": (STRUCTURED, b'{"specversion": "1.0", "id": "1", "source": "/"}'),
    "a future version": structured(specversion="2.0"),
    "an empty id": structured(id=""),
    "an id that is too long": structured(id="i" * 256),
    "a type that is too long": structured(type="order." + "t" * 250),
    "a control character in the type": structured(type="order.\n"),
    "a NUL in the subject": structured(subject="\0"),
    "half a surrogate": structured(subject="\ud800"),
    "a time that is none": structured(time="yesterday"),
    "a batch that is none": (BATCHED, b"{}"),
    "no id in binary mode": changed(binary(), ce_id=""),
    "half of a percent-encoding": changed(binary(), ce_subject="100%"),
    "an attribute twice": (changed(binary(), CE_Id="2")[0], b"1"),
    "an id that is a number": (STRUCTURED, structured()[1].replace(b'"1"', b"1")),
    "an empty subject": structured(subject=""),
    "an empty dataschema": structured(dataschema=""),
    "an empty content type of the data": structured(datacontenttype=""),
    "a content type that is none": structured(datacontenttype="xyz"),
    "a content type that is none, in binary mode": changed(binary(), content_type="xyz"),
    "neither event nor webhook": ({"content-type": "application/json"}, b'{"type": "order.created"}'),
    "a webhook without a type": webhook(b"{}"),
    "a webhook whose type is no text": webhook(b'{"type": 7}'),
    "a webhook that is no object": webhook(b"[]"),
    "a webhook that is no JSON": webhook(b"order.created"),
}


@on_sqlite
@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_malformed_is_declined_with_400(
    name: str, sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    answered = await sender.post(*MALFORMED[name])
    assert answered.status == 400
    assert answered.line, "people look why"
    await nothing_is_stored(outbox, arrivals)


FOREIGN = {
    "another format of events": ({"content-type": "application/cloudevents+avro"}, b"1"),
    "another charset": ({"content-type": "application/cloudevents+json; charset=utf-16"}, b"1"),
    "a compressed body": changed(structured(), content_encoding="gzip"),
    "a webhook that is a form": changed(
        webhook(b"type=order.created"), content_type="application/x-www-form-urlencoded"
    ),
    "a webhook that is nothing": changed(webhook(), content_type=""),
}


@on_sqlite
@pytest.mark.parametrize("name", FOREIGN)
async def test_what_cannot_be_read_here_is_declined_with_415(
    name: str, sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    assert (await sender.post(*FOREIGN[name])).status == 415
    await nothing_is_stored(outbox, arrivals)


@on_sqlite
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
async def test_nothing_but_post_is_allowed(method: str, sender: Sender, outbox: Outbox, arrivals: Arrivals) -> None:
    async with sender.connection() as (reader, writer):
        writer.write(head({}, method=method))
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    assert status.split()[1] == "405"
    assert "allow: post" in headers


@on_sqlite
@pytest.mark.parametrize("secrets", [None, SECRET])
async def test_a_sender_that_asks_whether_it_may_send_is_told_yes(
    outbox: Outbox, listener: Listener, recorder: Recorder, secrets: str | None
) -> None:
    """As CloudEvents' "HTTP 1.1 Web Hooks" has it. Permission is no signature."""
    async with serving(outbox.http_app([listener], secrets=secrets)) as sender:
        for rate in ({}, {"WebHook-Request-Rate": "120"}):
            asking = {"WebHook-Request-Origin": "events.example.com", **rate}
            answered = await sender.post(asking, b"", method="OPTIONS")
            assert answered.status == 200
            assert answered.headers["webhook-allowed-origin"] == "events.example.com"
            assert answered.headers["webhook-allowed-rate"] == "*"
            assert answered.headers["allow"] == "POST"
        sent = await sender.post({**structured()[0], **asking}, structured()[1])
        assert sent.status == (202 if secrets is None else 401)
        for origin in ("two words", "a\tb", "*", "x" * 256, "ö"):
            answered = await sender.post({"WebHook-Request-Origin": origin}, b"", method="OPTIONS")
            assert (answered.status, "webhook-allowed-origin" in answered.headers) == (400, False)


def tampered() -> dict[str, tuple[Any, bytes]]:
    good = signed(structured(), SECRET)
    now = int(time.time())
    return {
        "not signed": structured(),
        "no id": ({name: value for name, value in good[0].items() if name != "webhook-id"}, good[1]),
        "no time": ({name: value for name, value in good[0].items() if name != "webhook-timestamp"}, good[1]),
        "no signature": changed(good, webhook_signature=""),
        "another secret": signed(structured(), OTHER_SECRET),
        "another body": (good[0], good[1].replace(b"created", b"deleted")),
        "another id": changed(good, webhook_id="msg_2"),
        "another time": changed(good, webhook_timestamp=str(now + 1)),
        "an old one": signed(structured(), SECRET, at=now - 400),
        "one of the future": signed(structured(), SECRET, at=now + 400),
        "a signature of nothing": changed(good, webhook_signature="v1,"),
    }


@on_sqlite
@pytest.mark.parametrize("name", list(tampered()))
async def test_what_is_not_signed_as_it_should_be_is_declined_with_401(
    name: str, outbox: Outbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    app = outbox.http_app([listener], secrets=SECRET)
    async with serving(app, lifespan="off") as sender:
        answered = await sender.post(*tampered()[name])
    assert answered.status == 401
    assert recorder.of(RequestDeclined) == [RequestDeclined(401, answered.line)]
    assert SECRET.removeprefix("whsec_") not in answered.line
    await nothing_is_stored(outbox, arrivals)


async def test_one_malformed_event_declines_its_batch_as_a_whole(
    sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    events = [attributes(str(id)) for id in range(5)]
    assert (await sender.post(*batched(*events, attributes("")))).status == 400
    assert (await sender.post(*batched(*events, attributes("6", "parcel.sent")))).status == 404
    await nothing_is_stored(outbox, arrivals)
    assert (await sender.post(*batched(*events))).is_taken


async def test_a_path_does_not_make_up_for_a_body_that_is_no_json(
    sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    assert (await sender.post(*webhook(b"{"), path="/order.paid")).status == 400
    await nothing_is_stored(outbox, arrivals)


async def test_a_type_that_nobody_listens_for_is_declined_with_404(
    sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    answered = await sender.post(*structured(type="parcel.sent"))
    assert (answered.status, "parcel.sent" in answered.line) == (404, True)
    await nothing_is_stored(outbox, arrivals)


async def test_a_type_that_is_to_be_discarded_is_taken_and_forgotten(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    outbox = make_outbox(unroutable={"parcel.#": "discard"})
    async with serving(outbox.http_app([listener], secrets=None)) as sender:
        assert (await sender.post(*structured(type="parcel.sent"))).is_taken
        assert (await sender.post(*structured(type="letter.sent"))).status == 404
        await nothing_is_stored(outbox, arrivals)


async def test_an_event_that_is_older_than_the_inbox_is_declined_until_it_is_sent_anew(
    sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    long_ago = (datetime.now(UTC) - timedelta(days=31)).isoformat()
    answered = await sender.post(*structured(time=long_ago))
    assert (answered.status, "inbox_retention" in answered.line) == (422, True)
    await nothing_is_stored(outbox, arrivals)
    replayed = structured(time=long_ago, outboxduetime=datetime.now(UTC).isoformat())
    assert (await sender.post(*replayed)).is_taken, "the sender's replay is due now"


async def test_what_the_database_cannot_hold_is_declined_and_spoils_nothing_else(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    await outbox.create_tables()
    table = outbox.tables.messages.name
    async with outbox.transaction() as session:
        if "sqlite" in str(outbox.engines.main.url):
            refuse = f"CREATE TRIGGER {table}_no BEFORE INSERT ON {table} WHEN NEW.routing_key = 'order.bad' BEGIN "
            await session.execute(text(refuse + "SELECT RAISE(ABORT, 'no'); END"))
        else:
            await session.execute(text(f"ALTER TABLE {table} ADD CHECK (routing_key <> 'order.bad')"))
    async with serving(outbox.http_app([listener], secrets=None), lifespan="off") as sender:
        types = ["order.good", "order.bad", "order.good"]
        sending = [sender.post(*structured(id=str(id), type=type)) for id, type in enumerate(types)]
        assert [each.status for each in await asyncio.gather(*sending)] == [202, 422, 202]
    assert [each.message.routing_key for each in await outbox.messages()] == ["order.good"] * 2


# Sizes and times.


async def test_a_request_that_says_it_is_too_large_is_declined_before_it_is_read(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=None, max_request_size=1000)
    async with serving(app) as sender:
        for length in ("1001", "999999999999999999"):
            answered = await sender.raw(head(STRUCTURED, length=length))
            assert (answered.status, "1000 bytes" in answered.line) == (413, True)
        headers, body = structured("x" * 800)
        assert (await sender.post(headers, body)).is_taken
        await eventually(lambda: arrivals.qsize() == 1)


async def test_a_request_that_does_not_say_how_large_it_is_is_counted_while_it_is_read(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=None, max_request_size=1000)
    async with serving(app) as sender:
        chunked = head({**STRUCTURED, "transfer-encoding": "chunked"})
        answered = await sender.raw(chunked, *[b"64\r\n" + b" " * 100 + b"\r\n"] * 11)
        assert answered.status == 413
        body = structured(1)[1]
        whole = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        assert (await sender.raw(chunked, whole)).is_taken, "in whatever pieces it comes"
        assert (await arrival(arrivals))[0] == 1
    assert arrivals.empty()


@on_sqlite
async def test_more_events_than_are_read_at_once_are_declined_with_413(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    async with serving(outbox.http_app([listener], secrets=None), lifespan="off") as sender:
        events = [attributes(str(id)) for id in range(MOST_EVENTS + 1)]
        answered = await sender.post(*batched(*events))
        assert (answered.status, f"at most {MOST_EVENTS} events" in answered.line) == (413, True)
        await nothing_is_stored(outbox, arrivals)
        assert (await sender.post(*batched(*events[:-1]))).is_taken


async def test_a_body_beyond_max_body_size_is_declined_and_the_largest_one_is_taken(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    outbox = make_outbox(max_body_size=300_000)
    async with serving(outbox.http_app([listener], secrets=None)) as sender:
        assert (await sender.post({**binary()[0], "content-type": "x/y"}, b"\xff" * 300_001)).status == 413
        assert (await sender.post({**binary()[0], "content-type": "x/y"}, b"\xff" * 300_000)).is_taken
        assert len((await arrival(arrivals))[1].body) == 300_000
    assert arrivals.empty()


async def test_a_request_that_comes_too_slowly_is_declined_and_holds_nobody_up(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=None, timeout=SHORT)
    headers, body = structured()
    async with serving(app) as sender, sender.connection() as (reader, writer):
        writer.write(head(headers, length=len(body)) + body[:-1])
        answered = await answer(reader)
        assert (answered.status, answered.headers["connection"]) == (408, "close")
        assert await reader.read() == b"", "the connection is closed"
    await nothing_is_stored(outbox, arrivals)


async def test_a_sender_that_leaves_in_the_middle_leaves_nothing_behind(
    sender: Sender, arrivals: Arrivals, recorder: Recorder
) -> None:
    headers, body = structured()
    async with sender.connection() as (_, writer):
        writer.write(head(headers, length=len(body) + 1) + body)  # one byte more than there is
        await writer.drain()
    assert (await sender.post(*structured(2, id="2"))).is_taken
    assert (await arrival(arrivals))[0] == 2
    assert [each.stored for each in recorder.of(Received)] == [1]
    assert arrivals.empty()


async def test_an_event_that_is_longer_than_it_says_is_cut_and_declined(
    sender: Sender, outbox: Outbox, arrivals: Arrivals
) -> None:
    headers, body = structured()
    assert (await sender.raw(head(headers, length=len(body) - 1), body)).status == 400
    await nothing_is_stored(outbox, arrivals)


@on_sqlite
async def test_a_length_that_is_none_reaches_nobody(sender: Sender, outbox: Outbox, arrivals: Arrivals) -> None:
    headers, body = structured()
    for length in ("-1", "+5", "1e3", "0x10", ""):
        assert (await sender.raw(head(headers, length=length), body)).status == 400
    await nothing_is_stored(outbox, arrivals)


async def test_more_requests_at_once_than_are_wanted_are_told_to_come_again(
    outbox: Outbox, make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=None, most_at_once=2)
    async with serving(app) as sender:
        async with held(make_outbox()):
            sending = [asyncio.ensure_future(sender.post(*structured(id, id=str(id)))) for id in range(2)]
            await eventually(lambda: app._intake._storing == 2)
            answered = await sender.post(*structured(2, id="2"))
            assert (answered.status, answered.headers["retry-after"]) == (503, "1")
        assert {each.status for each in await asyncio.gather(*sending)} == {202}
        assert (await sender.post(*structured(2, id="2"))).is_taken, "there is room again"
        assert {(await arrival(arrivals))[0] for _ in range(3)} == {0, 1, 2}


# The database.


async def test_what_comes_together_is_stored_together(
    outbox: Outbox, make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    app = outbox.http_app([listener], secrets=None)
    storage = app._intake.storage("orders")
    async with serving(app) as sender:
        async with held(make_outbox()):
            first = asyncio.ensure_future(sender.post(*structured(0, id="0")))
            await eventually(lambda: storage._writing is not None and len(storage._waiting) == 1)
            sending = asyncio.gather(*(sender.post(*structured(id, id=str(id))) for id in range(1, 30)))
            await eventually(lambda: len(storage._waiting) == 30)
        assert {each.status for each in [await first, *await sending]} == {202}
        assert {(await arrival(arrivals))[0] for _ in range(30)} == set(range(30))
    assert [each.stored for each in recorder.of(Received)] == [1, 29]


def test_one_event_loop_does_not_wait_for_what_another_stores(
    database_url: str, table_name: str, listener: Listener
) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, log=False)
    app = outbox.http_app([listener], secrets=None, timeout=SHORT)

    async def post(id: str) -> int:
        headers, body = structured(id=id)
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(event: Any) -> None:
            sent.append(event)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await app({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive, send)
        status: int = sent[0]["status"]
        return status

    async def begin() -> asyncio.Task[int]:
        await outbox.create_tables()
        task = asyncio.create_task(post("1"))
        while app._intake.storage("orders")._writing is None:
            await asyncio.sleep(0)
        return task

    async def is_taken() -> bool:
        return await post("2") == 202

    async def eventually_taken() -> None:
        await eventually(is_taken)
        await outbox.store.close()

    first = asyncio.new_event_loop()
    stopped_in_the_middle = first.run_until_complete(begin())
    asyncio.run(eventually_taken())
    first.run_until_complete(stopped_in_the_middle)
    first.run_until_complete(outbox.close())
    first.close()


async def test_while_the_database_is_silent_senders_are_told_to_come_again_and_then_nothing_happens_twice(
    outbox: Outbox, make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    app = outbox.http_app([listener], secrets=None, timeout=SHORT)

    async with serving(app) as sender:

        async def answered(status: int, order: int = 1) -> Answered | None:
            """What comes sooner or later: so short a time may be over for other reasons, too."""
            found = await sender.post(*structured(order, id=str(order)))
            return found if found.status == status else None

        async with held(make_outbox()):
            silent = await eventually(lambda: answered(503))
            assert silent.headers["retry-after"] == "5"
            assert arrivals.empty()
        await arrival(arrivals)  # whether it was stored was unknown, and it was
        await eventually(lambda: answered(202))
        await eventually(lambda: answered(202, order=2))
        assert (await arrival(arrivals))[0] == 2
    assert arrivals.empty()


async def test_while_the_database_is_away_senders_are_told_to_come_again(listener: Listener) -> None:
    recorder = Recorder()
    outbox = Outbox(db_engine_url="postgresql+asyncpg://nobody:pass@127.0.0.1:1/nothing", observers=[recorder])
    async with serving(outbox.http_app([listener], secrets=None), lifespan="off") as sender:
        answered = await sender.post(*structured())
    assert (answered.status, answered.headers["retry-after"]) == (503, "5")
    assert "pass" not in answered.line
    assert recorder.of(Troubled)[0].where == "storing for orders"
    await outbox.close()


async def test_a_database_that_cannot_prove_who_it_is_costs_no_message(listener: Listener, tmp_path: Path) -> None:
    """The error of a certificate is a ValueError, and so is that of a value which cannot be stored."""
    make_certificates(tmp_path / "tls", host="localhost")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "tls/certificate.pem", tmp_path / "tls/key.pem")

    async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # PostgreSQL's question for TLS
        writer.write(b"S")
        with suppress(OSError):
            await writer.start_tls(theirs)
        writer.close()

    async with await asyncio.start_server(shake_hands, "127.0.0.1", 0) as server:
        url = f"postgresql+asyncpg://nobody@localhost:{server.sockets[0].getsockname()[1]}/nothing"
        engine = create_async_engine(url, connect_args={"ssl": ssl.create_default_context()})
        await is_told_to_come_again(Outbox(db_engine=engine, log=False), listener)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_database_whose_name_is_wrong_costs_no_message(listener: Listener, driver: str) -> None:
    url = f"postgresql+{driver}://nobody@{'a' * 70}.invalid/nothing"  # a label is too long to be asked for
    await is_told_to_come_again(Outbox(db_engine_url=url, log=False), listener)


async def is_told_to_come_again(outbox: Outbox, listener: Listener) -> None:
    async with serving(outbox.http_app([listener], secrets=None), lifespan="off") as sender:
        assert (await sender.post(*structured())).status == 503
    await outbox.close()


# Working off.


async def test_the_application_works_whatever_the_transport_outward_is(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    sent: asyncio.Queue[Message] = asyncio.Queue()

    async def publish(message: Message) -> None:
        sent.put_nowait(message)

    outbox = make_outbox(transport=publish)
    async with serving(outbox.http_app([listener], secrets=None)) as sender, outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", "from here")
        assert (await sender.post(*structured("from there"))).is_taken
        assert (await arrival(arrivals))[0] == "from there"
        assert (await arrival(sent)).body == b'"from here"'
    assert arrivals.empty(), "what is emitted here goes to the transport"
    assert sent.empty(), "and what came in does not"
    assert await outbox.bindings() == []


async def test_a_broker_outward_hears_nothing_of_what_comes_in(
    make_outbox: MakeOutbox, listener: Listener, arrivals: Arrivals
) -> None:
    broker = MemoryTransport()
    await broker.declare([Listener("#", print, queue="elsewhere")])
    outbox = make_outbox(transport=broker)
    async with serving(outbox.http_app([listener], secrets=None)) as sender, outbox.running(relay=True):
        assert (await sender.post(*structured("from there"))).is_taken
        assert (await arrival(arrivals))[0] == "from there"
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", "from here")
        await eventually(lambda: broker.waiting("elsewhere") == 1)
    assert [message.body for message in broker.published] == [b'"from here"']
    assert arrivals.empty()


async def test_where_the_database_is_the_transport_its_listeners_hear_what_is_emitted_here_too(
    outbox: Outbox, sender: Sender, arrivals: Arrivals
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", "from here")
    assert (await arrival(arrivals))[0] == "from here"


async def test_what_nobody_works_off_waits_and_that_is_said_once(
    outbox: Outbox, listener: Listener, arrivals: Arrivals, recorder: Recorder
) -> None:
    async with serving(outbox.http_app([listener], secrets=None), lifespan="off") as sender:
        for id in range(2):
            assert (await sender.post(*structured(id, id=str(id)))).is_taken
    [advised] = recorder.of(Advised)
    assert "app.running()" in advised.advice
    assert [each.state for each in await outbox.messages(queue="orders")] == ["queued"] * 2
    await drain(outbox, [listener])
    assert {(await arrival(arrivals))[0], (await arrival(arrivals))[0]} == {0, 1}


async def test_where_somebody_works_nothing_is_advised(sender: Sender, recorder: Recorder) -> None:
    assert (await sender.post(*structured())).is_taken
    assert recorder.of(Advised) == []


async def test_a_failed_message_is_retried_like_any_other(outbox: Outbox) -> None:
    attempts: asyncio.Queue[int] = asyncio.Queue()

    async def on_order(body: Any, attempt_count: int) -> None:
        attempts.put_nowait(attempt_count)
        if attempt_count == 1:
            raise ConnectionError("no")

    listener = Listener("order.*", on_order, queue="orders", retry_delays=(0.01,))
    async with serving(outbox.http_app([listener], secrets=None)) as sender:
        assert (await sender.post(*structured())).is_taken
        assert [await arrival(attempts), await arrival(attempts)] == [1, 2]


# The application as servers see it.


async def startup(app: HttpApp) -> dict[str, Any]:
    """What an application says to a server that starts it."""
    said: asyncio.Queue[Any] = asyncio.Queue()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    heard.put_nowait({"type": "lifespan.startup"})
    heard.put_nowait({"type": "lifespan.shutdown"})

    async def send(event: Any) -> None:
        said.put_nowait(event)

    await app({"type": "lifespan"}, heard.get, send)
    return dict(said.get_nowait())


@on_sqlite
async def test_a_server_hears_that_the_application_cannot_start_and_why(
    make_outbox: MakeOutbox, listener: Listener
) -> None:
    async with make_outbox(transport="memory://").running(relay=True):
        pass
    failed = await startup(make_outbox().http_app([listener], secrets=None))
    assert failed["type"] == "lifespan.startup.failed"
    assert failed["message"].startswith("TransportMismatch: ")
    assert (await startup(make_outbox(transport="memory://").http_app([listener], secrets=None)))["type"] == (
        "lifespan.startup.complete"
    )


@on_sqlite
async def test_a_websocket_is_closed(outbox: Outbox, listener: Listener) -> None:
    said: list[Any] = []

    async def send(event: Any) -> None:
        said.append(event)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await outbox.http_app([listener], secrets=None)({"type": "websocket"}, receive, send)
    assert said == [{"type": "websocket.close"}]


# What cannot work is said at once.


@on_sqlite
async def test_secrets_are_required_unless_somebody_wants_none(outbox: Outbox, listener: Listener) -> None:
    with pytest.raises(ConfigurationError, match="secrets=None"):
        outbox.http_app([listener])
    outbox.http_app([listener], secrets=None)


@on_sqlite
async def test_a_request_is_known_for_as_long_as_its_signature_is_valid(
    make_outbox: MakeOutbox, listener: Listener
) -> None:
    forgetful = make_outbox(inbox_retention=timedelta(minutes=9))
    with pytest.raises(ConfigurationError, match=r"inbox_retention=9m: .* at least 10m"):
        forgetful.http_app([listener], secrets=SECRET)
    forgetful.http_app([listener], secrets=None)
    for retention in (timedelta(minutes=10), NEVER):
        make_outbox(inbox_retention=retention).http_app([listener], secrets=SECRET)


@on_sqlite
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"secrets": "password"}, "whsec_"),
        ({"secrets": []}, "whsec_"),
        ({"secrets": None, "max_request_size": 0}, "max_request_size"),
        ({"secrets": None, "max_request_size": True}, "max_request_size"),
        ({"secrets": None, "most_at_once": 0}, "most_at_once"),
        ({"secrets": None, "most_at_once": "9"}, "most_at_once"),
        ({"secrets": None, "timeout": 0}, "timeout"),
        ({"secrets": None, "timeout": "5"}, "timeout"),
        ({"secrets": None, "modes": ()}, "modes"),
        ({"secrets": None, "modes": "binary"}, "modes"),
        ({"secrets": None, "modes": ["plain"]}, "modes"),
    ],
)
async def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], said: str, outbox: Outbox, listener: Listener
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        outbox.http_app([listener], **options)
    assert "password" not in str(refused.value)


@on_sqlite
async def test_listeners_that_one_worker_cannot_serve_are_refused(outbox: Outbox, listener: Listener) -> None:
    with pytest.raises(ConfigurationError, match="share the queue"):
        outbox.http_app([listener, listener], secrets=None)
    with pytest.raises(ConfigurationError, match="at least one listener"):
        outbox.http_app([], secrets=None)


async def test_a_database_is_needed(listener: Listener) -> None:
    with pytest.raises(ConfigurationError, match="no database"):
        Outbox(transport="memory://").http_app([listener], secrets=None)


def test_the_package_has_it_too() -> None:
    method: Any = library.http_app
    assert method.__self__ is library.outbox
