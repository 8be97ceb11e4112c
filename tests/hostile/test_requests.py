"""Hostile requests and URLs: whatever a stranger sends to http_app(), others are served as if nothing had happened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import count, islice
from random import Random
from typing import Any

import pytest

from outbox import ConfigurationError, Listener, Message, SignatureInvalid, UrlRefused
from outbox.core.webhooks import Secrets, verify
from outbox.inbound.http.app import HttpApp
from outbox.transports.http import HttpTransport, check_url
from tests.support.databases import on_sqlite
from tests.support.observing import eventually
from tests.support.outboxes import MakeOutbox
from tests.support.sending import STRUCTURED, Sender, binary, head, serving, structured, webhook
from tests.support.sending import Message as Sent

from .requests import AT_ONCE, FOREIGN_SECRET, GROUPS, SECRET, Hostile, forged, signing
from .urls import INDEX_ERRORS, hostile_urls

SEED = 20_261_116
WITHIN = 15.0  # seconds for 60 ordinary requests: three times what they are promised
URLS, SIGNATURES = 130_000, 20_000


@dataclass
class Door:
    """An application with two queues behind a real server, and ordinary senders beside the hostile ones."""

    app: HttpApp
    sender: Sender
    handled: list[str] = field(default_factory=list)  # ordinary messages
    _numbers: count[int] = field(default_factory=count)

    async def serves_others(self) -> None:
        """Sixty ordinary requests for two queues, in every mode, are taken and handled, each once."""
        ids = [f"ordinary-{number}" for number in islice(self._numbers, 60)]
        began = time.monotonic()
        answers = await asyncio.gather(*(self.sender.post(*ordinary(id, number)) for number, id in enumerate(ids)))
        assert {each.status for each in answers} == {202}
        await eventually(lambda: set(ids) <= set(self.handled))
        assert time.monotonic() - began < WITHIN
        assert len(self.handled) == len(set(self.handled))

    async def answer(self, hostile: Hostile) -> int:
        """What a hostile request is told. Nothing may come out of the application but an answer."""
        parts = iter(hostile.body)
        last = max(len(hostile.body) - 1, 0)
        numbers = count()
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> dict[str, Any]:
            assert hostile.ends != "never", "it was to be declined before its body is read"
            number, part = next(numbers), next(parts, None)
            if part is None or (hostile.ends == "http.disconnect" and number > last):
                return {"type": "http.disconnect"}
            more = hostile.ends == "http.disconnect" or number < last
            return {"type": "http.request", "body": part, "more_body": more}

        async def send(event: MutableMapping[str, Any]) -> None:
            sent.append(event)

        scope = {"type": "http", "method": hostile.method, "path": hostile.path, "headers": hostile.headers}
        await self.app(scope, receive, send)
        status = sent[0]["status"]
        assert status in hostile.answers, (status, sent[1]["body"], hostile)
        assert b"Traceback" not in sent[1]["body"]
        return int(status)


def ordinary(id: str, number: int) -> Sent:
    """One of a sender that knows the secret; it has the same order and refund in every mode."""
    type = ("order.created", "refund.approved")[number % 2]
    modes = (structured(id, id=id, type=type), binary(id, id=id, type=type), webhook(b'{"type":"%s"}' % type.encode()))
    headers, body = modes[number % 3]
    return {**headers, **signing(body, id)}, body


@pytest.fixture
async def door(make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Door]:
    handled: list[str] = []

    async def handle(body: Any, message: Message) -> None:
        id = message.headers.get("webhook-id") or message.tracking_ids[-2]
        if id.startswith("ordinary-"):
            handled.append(id)

    listeners = [Listener("order.#", handle, queue="orders"), Listener("refund.#", handle, queue="refunds")]
    app = make_outbox(log=False).http_app(listeners, secrets=SECRET)
    async with serving(app) as sender:
        yield Door(app, sender, handled)
    worst = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert worst == [], "no error of the application reaches its server"


@on_sqlite
@pytest.mark.parametrize("name", GROUPS)
async def test_hostile_requests_are_answered_and_hinder_no_others(name: str, door: Door) -> None:
    write, size = GROUPS[name]
    requests = write(Random(SEED), size)
    while batch := list(islice(requests, AT_ONCE)):
        await asyncio.gather(*(door.answer(each) for each in batch))
    await door.serves_others()


@on_sqlite
async def test_idle_and_slow_senders_hinder_no_others(door: Door) -> None:
    """They begin as if they were signed, and send nothing more, or a byte now and then."""
    random = Random(SEED)
    async with AsyncExitStack() as stack:
        for number in range(250):
            _, writer = await stack.enter_async_context(door.sender.connection())
            headers = {**STRUCTURED, **forged(random, 0, b"", str(number))}
            writer.write(head(headers, length=random.choice([10, 1000, 100_000])) + b"{" * random.randrange(2))
            if number == 120:
                await door.serves_others()
        await door.serves_others()


@on_sqlite
async def test_bytes_that_are_no_request_hinder_no_others(door: Door) -> None:
    """Wrong lengths, broken heads, and random bytes: what the server does not refuse reaches the application."""
    random = Random(SEED)
    headers, body = ordinary("wrong", 0)
    lengths = ["-1", "+5", "0x10", "1e3", "", "99999999999999999999", "1, 2", str(len(body) - 1), str(len(body) + 5)]
    async with AsyncExitStack() as stack:
        for number in range(300):
            _, writer = await stack.enter_async_context(door.sender.connection())
            if number % 3 == 0:
                writer.write(head(headers, length=lengths[number // 3 % len(lengths)]) + body)
            elif number % 3 == 1:
                whole = head(headers, length=len(body)) + body
                at = random.randrange(len(whole))
                writer.write(whole[:at] + random.randbytes(5) + whole[at + 5 :])
            else:
                writer.write(random.randbytes(random.randrange(1, 2000)))
        await door.serves_others()


def test_no_forged_signature_is_taken() -> None:
    random, secrets = Random(SEED), Secrets(SECRET)
    headers, body = structured(7)
    now = time.time()
    assert verify(secrets, signing(body, "1"), body, now) == "1"
    taken = 0
    for number in range(SIGNATURES):
        with suppress(SignatureInvalid):
            verify(secrets, {**headers, **forged(random, number, body, "1")}, body, now)
            taken += 1
    assert taken == 0
    assert Secrets(FOREIGN_SECRET).signatures(body) != secrets.signatures(body)


@pytest.mark.parametrize("url", INDEX_ERRORS)
def test_urls_that_yarl_stumbles_over_are_refused(url: str) -> None:
    with pytest.raises(UrlRefused):
        check_url(url)
    with pytest.raises(ConfigurationError):
        HttpTransport(url)


def test_every_url_is_taken_or_refused() -> None:
    """Nothing but UrlRefused comes out, and what is taken leads out into the public network by https."""
    taken = 0
    for number, url in enumerate(islice(hostile_urls(Random(SEED)), URLS)):
        try:
            found = check_url(url)
        except UrlRefused:
            found = None
        else:
            taken += 1
            assert found is not None
            assert (found.scheme, found.user, found.password) == ("https", None, None), url
            assert leads_outside(found.host or ""), url
        if number % 10 == 0:  # the same without the check for strangers' URLs
            with suppress(ConfigurationError):
                HttpTransport(url, plain_http=True)
    assert taken > URLS / 200, "some must be good, or nothing was tried"


def leads_outside(host: str) -> bool:
    """As far as one can tell without resolving it."""
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", "localhost"))
