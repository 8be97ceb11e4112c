"""Ids that a stranger gave a message: what a listener emits because of it is delivered all the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Message, Outbox, Reason
from outbox.core.message import MOST_IDS, check_message_ids
from tests.support.broker import VirtualHost
from tests.support.databases import on_sqlite
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

from .amqp import header, properties, stranger
from .rows import ordinary_row

pytestmark = on_sqlite

BROKEN = "a\nb"
HALF = '["\\ud800"]'  # half a character, as JSON names it


class Service:
    """A listener without a session that emits for each message, and one with a session for what it emits."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.children: dict[str, Message] = {}
        self.listeners = [
            Listener("parent.#", self._parent, queue="parents"),
            Listener("child.#", self._child, queue="children", retry_delays=()),
        ]

    async def _parent(self, body: str) -> None:
        async with self.outbox.transaction() as session:
            await self.outbox.emit(session, "child.made", body)

    async def _child(self, body: str, session: AsyncSession, letter: Message) -> None:
        self.children[body] = letter

    async def all_arrive(self, names: set[str]) -> None:
        await eventually(lambda: names <= self.children.keys())
        for message in self.children.values():
            check_message_ids(message)
        assert Counter(letter.reason for letter in await self.outbox.dead_letters.list(limit=1000)) == {}


async def insert(outbox: Outbox, name: str, **columns: Any) -> None:
    row = ordinary_row(f"stranger: {name}", "parent.row", name) | columns
    marks = ", ".join(f":{column}" for column in row)
    async with outbox.transaction() as session:
        await session.execute(
            text(f"INSERT INTO {outbox.tables.messages.name} ({', '.join(row)}) VALUES ({marks})"), row
        )


async def test_what_follows_from_a_row_with_odd_ids_is_delivered(make_outbox: MakeOutbox, recorder: Recorder) -> None:
    service = Service(make_outbox(observers=[recorder]))
    await service.outbox.create_tables()
    rows: dict[str, dict[str, Any]] = {
        "a line break": {"tracking_ids": json.dumps([BROKEN])},
        "a line break in its own": {"message_id": BROKEN},
        "an empty one": {"tracking_ids": '["", "é"]'},
        "256 bytes": {"tracking_ids": json.dumps(["é" * 128])},
        "40 KB": {"tracking_ids": json.dumps(["i" * 40_000])},
        "thousands": {"tracking_ids": json.dumps(["i"] * 5_000)},
    }
    for name, columns in rows.items():
        await insert(service.outbox, name, **columns)
    async with service.outbox.running(listeners=service.listeners):
        await service.all_arrive(set(rows))
    assert service.children["an empty one"].tracking_ids[:2] == ("é", "stranger: an empty one")
    assert len(service.children["thousands"].tracking_ids) == MOST_IDS


async def test_what_follows_from_a_row_with_odd_ids_passes_a_broker(
    make_outbox: MakeOutbox, vhost: VirtualHost
) -> None:
    service = Service(make_outbox(rabbitmq_url=vhost.url))
    await service.outbox.create_tables()
    await insert(service.outbox, "a line break", tracking_ids=json.dumps([BROKEN]))
    await insert(service.outbox, "a line break in its own", message_id=BROKEN)
    async with service.outbox.running(listeners=service.listeners, relay=True):
        await service.all_arrive({"a line break", "a line break in its own"})


async def test_what_follows_from_a_published_message_with_odd_ids_passes_a_broker(
    make_outbox: MakeOutbox, vhost: VirtualHost
) -> None:
    service = Service(make_outbox(rabbitmq_url=vhost.url))
    await service.outbox.create_tables()
    messages = {
        "a line break in its own": properties(message_id=BROKEN.encode()),
        "a line break": properties(header("outbox-tracking-ids", [BROKEN, "m"]), message_id=b"m"),
        "a line break in JSON": properties(header("x-outbox-tracking-ids", json.dumps([BROKEN, "m"]))),
        "an empty one": properties(header("outbox-tracking-ids", ["", "n"]), message_id=b"n"),
    }
    async with service.outbox.running(listeners=service.listeners, relay=True):
        async with stranger(vhost.url) as publisher:
            for name, data in messages.items():
                assert await publisher.publish("outbox", "parent.odd", data, json.dumps(name).encode())
        await service.all_arrive(set(messages))


async def test_a_message_with_half_a_character_in_an_id_is_a_dead_letter(
    make_outbox: MakeOutbox, vhost: VirtualHost
) -> None:
    service = Service(make_outbox(rabbitmq_url=vhost.url))
    await service.outbox.create_tables()
    await insert(service.outbox, "half", tracking_ids=HALF)
    letters = service.outbox.dead_letters
    async with service.outbox.running(listeners=service.listeners, relay=True):
        async with stranger(vhost.url) as publisher:
            data = properties(header("x-outbox-tracking-ids", HALF))
            assert await publisher.publish("outbox", "parent.odd", data, b'"half"')
        async with service.outbox.transaction() as session:
            await service.outbox.emit(session, "parent.ordinary", "ordinary")
        await eventually(lambda: "ordinary" in service.children)
        [dead] = await letters.list(queue="parents")
        assert (dead.reason, dead.error) == (Reason.UNDECODABLE, dead.error)
        assert "not valid Unicode" in str(dead.error)
        [dead] = await letters.list(queue="")
        assert (dead.reason, "not valid Unicode" in str(dead.error)) == (Reason.UNDECODABLE, True)
    assert service.children.keys() == {"ordinary"}
