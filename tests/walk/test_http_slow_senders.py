"""http_app() and senders that are slow: they use up nothing that those who can sign need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from outbox import Listener, Message, Outbox
from outbox.core.events import RequestDeclined
from outbox.inbound.http import bodies
from outbox.inbound.http.app import HttpApp
from outbox.inbound.http.bodies import Bodies
from outbox.inbound.http.response import Declined
from tests.support.databases import on_sqlite
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.sending import STRUCTURED, Answered, Sender, answer, head, serving, signed, structured

Arrivals = asyncio.Queue[tuple[Any, Message]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SHORT = 0.3


def under_way(app: HttpApp) -> int:
    return app._intake._here().bodies.under_way


def claiming_to_be_signed() -> dict[str, str]:
    """Headers that anybody can write: no secret is needed for them."""
    return {**STRUCTURED, "webhook-id": "1", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,x"}


@asynccontextmanager
async def idle(sender: Sender, count: int, headers: dict[str, str]) -> AsyncIterator[list[Connection]]:
    """Connections that sent the first byte of a body, and then nothing."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(sender.connection()) for _ in range(count)]
        for _, writer in found:
            writer.write(head(headers, length=1000) + b"{")
        yield found


async def answered_at_once(sender: Sender, id: str) -> Answered:
    """What an ordinary signed request is told; less than the time that idle ones have."""
    began = time.monotonic()
    answered = await sender.post(*signed(structured(1, id=id), SECRET, id=id))
    assert time.monotonic() - began < bodies.FIRST
    return answered


@on_sqlite
async def test_what_says_nothing_of_a_signature_is_declined_before_its_body_is_read(
    outbox: Outbox, listener: Listener
) -> None:
    old = {**claiming_to_be_signed(), "webhook-timestamp": str(int(time.time()) - 400)}
    app = outbox.http_app([listener], secrets=SECRET)
    async with serving(app) as sender:
        for headers in ({**STRUCTURED}, old, {**claiming_to_be_signed(), "webhook-signature": ""}):
            async with idle(sender, 1, headers) as [(reader, _)]:
                assert (await answer(reader)).status == 401
        assert under_way(app) == 0


@on_sqlite
async def test_idle_connections_keep_nobody_out_who_can_sign(outbox: Outbox, listener: Listener) -> None:
    app = outbox.http_app([listener], secrets=SECRET)
    async with serving(app) as sender, idle(sender, 250, claiming_to_be_signed()) as connections:
        await eventually(lambda: under_way(app) == 100)
        for number in range(20):
            assert (await answered_at_once(sender, str(number))).is_taken
        displaced = await answer(connections[0][0])
        assert (displaced.status, displaced.headers["retry-after"], displaced.headers["connection"]) == (
            503,
            "1",
            "close",
        )


@on_sqlite
async def test_of_many_that_are_slow_those_are_displaced_that_pause_longest(outbox: Outbox, listener: Listener) -> None:
    app = outbox.http_app([listener], secrets=SECRET, most_at_once=2)
    headers, body = signed(structured(1), SECRET)
    async with serving(app) as sender, sender.connection() as (reader, writer):
        writer.write(head(headers, length=len(body)) + body[:1])
        for end in range(2, 12):
            await eventually(lambda: under_way(app) >= 1)
            async with idle(sender, 1, claiming_to_be_signed()):
                await eventually(lambda: under_way(app) == 2)
                writer.write(body[end - 1 : end])
                await eventually(partial(bodies_read, app, end))
        writer.write(body[11:])
        assert (await answer(reader)).is_taken


def bodies_read(app: HttpApp, size: int) -> bool:
    """Whether somebody's body came so far."""
    return any(reading.size >= size for reading in app._intake._here().bodies._readings)


@on_sqlite
async def test_a_body_has_a_least_rate(outbox: Outbox, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST", SHORT)
    app = outbox.http_app([listener], secrets=SECRET)  # 15 s for a request
    began = time.monotonic()
    async with serving(app) as sender, sender.connection() as (reader, writer):
        writer.write(head(claiming_to_be_signed(), length=1000))
        answering = asyncio.ensure_future(answer(reader))
        while not answering.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        answered = await answering
    assert (answered.status, answered.headers["connection"]) == (408, "close")
    assert time.monotonic() - began < 10


async def test_a_body_that_keeps_the_rate_has_as_long_as_it_needs_up_to_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "FIRST", SHORT)
    monkeypatch.setattr(bodies, "LEAST_RATE", 1000)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(SHORT / 3)
        return {"type": "http.request", "body": b" " * 1000, "more_body": next(more)}

    more = iter([True] * 5 + [False])
    reading = Bodies(largest=100_000, most_at_once=1, within=60)
    assert len(await reading.read({}, receive)) == 6000, "twice as long as the first bytes have"
    more = iter([True] * 1000)
    with pytest.raises(Declined, match="did not arrive within 1 s"):
        await Bodies(largest=10**9, most_at_once=1, within=1).read({}, receive)


@on_sqlite
async def test_every_request_is_told_why_it_was_declined(make_outbox: MakeOutbox, listener: Listener) -> None:
    recorder = Recorder()
    app = make_outbox(observers=[recorder]).http_app([listener], secrets=SECRET, most_at_once=1)
    async with serving(app) as sender, idle(sender, 2, claiming_to_be_signed()) as connections:
        assert (await answer(connections[0][0])).status == 503
        assert (await answered_at_once(sender, "1")).is_taken
        assert (await answer(connections[1][0])).status == 503
        assert [each.status for each in recorder.of(RequestDeclined)] == [503, 503]
