"""http_app() and a signed request that somebody captured: it stays what it was, and happens once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks import Webhook

from outbox import Listener, Message, Outbox
from outbox.core.cloudevents import binary as write
from outbox.core.events import Received
from tests.support.observing import Recorder, arrival
from tests.support.outboxes import MakeOutbox
from tests.support.sending import BATCHED, STRUCTURED, attributes, batched, binary, serving, signed, structured, webhook
from tests.support.sending import Message as Sent

Arrivals = asyncio.Queue[tuple[Any, Message]]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
EVENT = b'{"specversion":"1.0","id":"1","source":"/shop","type":"order.created","data":1}'

ORIGINALS: Mapping[str, tuple[str, Sent]] = {  # path and request; a body that all modes can read
    "structured": ("/", (STRUCTURED, EVENT)),
    "batched": ("/", (BATCHED, b"[" + EVENT + b"]")),
    "binary": ("/", (binary(id="1")[0], EVENT)),
    "webhook": ("/order.created", ({"content-type": "application/json"}, EVENT)),
}
OTHERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "an event in structured mode": ("/", STRUCTURED),
    "another type": ("/", binary(type="order.refunded")[0]),
    "another type of another queue": ("/", binary(type="refund.approved")[0]),
    "another source": ("/", binary(source="/bank")[0]),
    "another id": ("/", binary(id="2")[0]),
    "a webhook": ("/", {"content-type": "application/json"}),
    "a webhook at another path": ("/order.refunded", {"content-type": "application/json"}),
    "a webhook for another queue": ("/refund.approved", {"content-type": "application/json"}),
}


@pytest.fixture
def outbox(make_outbox: MakeOutbox, recorder: Recorder) -> Outbox:
    return make_outbox(observers=[recorder])


@pytest.fixture
def listeners(listener: Listener, arrivals: Arrivals) -> list[Listener]:
    return [listener, Listener("refund.*", listener.callback, queue="refunds")]


def stored(recorder: Recorder) -> int:
    return sum(each.stored for each in recorder.of(Received))


@pytest.mark.parametrize("name", ORIGINALS)
async def test_a_captured_request_becomes_nothing_else(
    name: str, outbox: Outbox, listeners: list[Listener], arrivals: Arrivals, recorder: Recorder
) -> None:
    path, original = ORIGINALS[name]
    headers, body = signed(original, SECRET, id="1")
    signature = {name: value for name, value in headers.items() if name.startswith("webhook-")}
    async with serving(outbox.http_app(listeners, secrets=SECRET)) as sender:
        assert (await sender.post(headers, body, path)).is_taken
        await arrival(arrivals)
        for other, (path_of_other, headers_of_other) in OTHERS.items():
            answered = await sender.post({**headers_of_other, **signature}, body, path_of_other)
            if other == "an event in structured mode" and name == "structured":
                assert answered.is_taken
            else:
                assert answered.status in (400, 401, 409), other
        assert (await sender.post(headers, body, path)).is_taken, "the sender itself may send it again"
    assert stored(recorder) == 1
    assert arrivals.empty()


async def test_of_two_readings_that_come_at_once_one_is_taken(
    outbox: Outbox, listeners: list[Listener], recorder: Recorder
) -> None:
    headers, body = signed((binary(id="1")[0], EVENT), SECRET, id="1")
    types = ["order.created", "order.refunded", "refund.approved", "refund.asked"]
    async with serving(outbox.http_app(listeners, secrets=SECRET), lifespan="off") as sender:
        sending = [sender.post({**headers, "ce-type": type}, body) for type in types for _ in range(5)]
        answered = await asyncio.gather(*sending)
    assert sorted(each.status for each in answered) == [202] * 5 + [409] * 15
    assert stored(recorder) == 1


async def test_one_that_was_captured_spoils_no_other(
    outbox: Outbox, listeners: list[Listener], recorder: Recorder
) -> None:
    headers, body = signed((binary(id="1")[0], EVENT), SECRET, id="1")
    good = [signed(structured(number, id=str(number)), SECRET, id=str(number)) for number in range(10, 30)]
    async with serving(outbox.http_app(listeners, secrets=SECRET), lifespan="off") as sender:
        assert (await sender.post(headers, body)).is_taken
        captured = [sender.post({**headers, "ce-type": "order.refunded"}, body) for _ in range(20)]
        answered = await asyncio.gather(*captured, *(sender.post(*each) for each in good))
    assert [each.status for each in answered] == [409] * 20 + [202] * 20
    assert stored(recorder) == 21


async def test_a_request_for_several_queues_is_stored_in_those_that_lack_it(
    outbox: Outbox, listeners: list[Listener], arrivals: Arrivals, recorder: Recorder
) -> None:
    """As after a crash between two transactions: the sender got no answer, and sends it again."""
    everything = [*listeners, Listener("#", listeners[0].callback, queue="audit")]
    headers, body = signed((binary(id="1")[0], EVENT), SECRET, id="1")
    async with serving(outbox.http_app(listeners, secrets=SECRET)) as sender:
        assert (await sender.post(headers, body)).is_taken
        assert (await arrival(arrivals))[1].routing_key == "order.created"
    async with serving(outbox.http_app(everything, secrets=SECRET)) as sender:
        assert (await sender.post(headers, body)).is_taken
        assert (await sender.post({**headers, "ce-type": "refund.asked"}, body)).status == 409
        assert (await arrival(arrivals))[1].routing_key == "order.created"
    assert stored(recorder) == 2
    assert arrivals.empty()


async def test_what_was_discarded_becomes_nothing_else_either(
    make_outbox: MakeOutbox, listeners: list[Listener], arrivals: Arrivals
) -> None:
    outbox = make_outbox(unroutable={"parcel.#": "discard"})
    headers, body = signed(binary(id="1", type="parcel.sent"), SECRET, id="1")
    async with serving(outbox.http_app(listeners, secrets=SECRET)) as sender:
        for _ in range(2):
            assert (await sender.post(headers, body)).is_taken
        assert (await sender.post({**headers, "ce-type": "order.created"}, body)).status == 409
    assert await outbox.messages() == []
    assert arrivals.empty()


async def test_leaving_out_one_of_two_signatures_makes_no_request_new(
    outbox: Outbox, listeners: list[Listener], recorder: Recorder
) -> None:
    headers, body = signed((binary(id="1")[0], EVENT), SECRET, OTHER_SECRET, id="1")
    app = outbox.http_app(listeners, secrets=[SECRET, OTHER_SECRET])
    async with serving(app, lifespan="off") as sender:
        assert (await sender.post(headers, body)).is_taken
        for signature in headers["webhook-signature"].split(" "):
            one = {**headers, "webhook-signature": signature}
            assert (await sender.post({**one, "ce-type": "order.refunded"}, body)).status == 409
            assert (await sender.post(one, body)).is_taken
    assert stored(recorder) == 1


async def test_senders_with_secrets_of_their_own_may_use_the_same_ids(
    outbox: Outbox, listeners: list[Listener], recorder: Recorder
) -> None:
    app = outbox.http_app(listeners, secrets=[SECRET, OTHER_SECRET])
    async with serving(app, lifespan="off") as sender:
        for secret, source in ((SECRET, "/shop"), (OTHER_SECRET, "/warehouse")):
            assert (await sender.post(*signed(binary(id="1", source=source), secret, id="1"))).is_taken
    assert stored(recorder) == 2


@pytest.mark.parametrize("id", ["1", "a.b", "ö 1", "a%3Ab", "a:b", "x" * 60])
async def test_in_binary_mode_the_id_is_what_was_signed(
    id: str, outbox: Outbox, listeners: list[Listener], arrivals: Arrivals
) -> None:
    """A sender of this library, and one that signs another id."""
    headers, body = write(Message(routing_key="order.created", body=b"1", tracking_ids=(id,)), "/shop")
    async with serving(outbox.http_app(listeners, secrets=SECRET)) as sender:
        assert (await sender.post(*signed((headers, body), SECRET, id=id))).is_taken
        assert (await arrival(arrivals))[1].tracking_ids[0] == id
        answered = await sender.post(*signed((headers, body), SECRET, id="another"))
        assert (answered.status, "ce-id" in answered.line) == (401, True)
    assert arrivals.empty()


async def test_a_sender_that_signs_an_id_as_it_is_may_have_dots_in_it(
    outbox: Outbox, listeners: list[Listener], arrivals: Arrivals
) -> None:
    headers, body = binary(id="a.b:c")
    now = datetime.now(UTC)
    signature = Webhook(SECRET).sign("a.b:c", now, body.decode())
    by_others = {"webhook-id": "a.b:c", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}
    async with serving(outbox.http_app(listeners, secrets=SECRET)) as sender:
        assert (await sender.post({**headers, **by_others}, body)).is_taken
        assert (await arrival(arrivals))[1].tracking_ids[0] == "a.b:c"
        another = await sender.post({**headers, "ce-id": "a.b", **by_others}, body)
        assert (another.status, "ce-id" in another.line) == (401, True)
    assert arrivals.empty()


MODES = {
    "structured": lambda sender: sender.post(*signed(structured(id="11"), SECRET, id="11")),
    "batched": lambda sender: sender.post(*signed(batched(attributes("12")), SECRET, id="12")),
    "binary": lambda sender: sender.post(*signed(binary(id="13"), SECRET, id="13")),
    "webhook": lambda sender: sender.post(*signed(webhook(), SECRET, id="14")),
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("modes", "taken"),
    [
        (["structured"], {"structured", "batched"}),
        (["binary"], {"binary"}),
        (["webhook"], {"webhook"}),
        (["structured", "webhook"], {"structured", "batched", "webhook"}),
        (["structured", "binary", "webhook"], set(MODES)),
    ],
)
async def test_modes_that_are_not_wanted_are_declined_with_415(
    modes: Any, taken: set[str], outbox: Outbox, listeners: list[Listener]
) -> None:
    for secrets in (SECRET, None):
        async with serving(outbox.http_app(listeners, secrets=secrets, modes=modes), lifespan="off") as sender:
            statuses = {name: (await post(sender)).status for name, post in MODES.items()}
        assert statuses == {name: 202 if name in taken else 415 for name in MODES}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_where_everything_is_signed_requests_need_no_entry_of_their_own(
    outbox: Outbox, listeners: list[Listener]
) -> None:
    app = outbox.http_app(listeners, secrets=SECRET, modes=["structured"])
    async with serving(app, lifespan="off") as sender:
        assert (await sender.post(*signed(structured(), SECRET))).is_taken
    async with outbox.transaction() as session:
        assert len((await session.execute(outbox.tables.inbox.select())).all()) == 1
