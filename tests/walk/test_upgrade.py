"""An outbox of an earlier commit works with this code: its tables, its messages in every state, and its topology.

`tests/data/outbox_63c9fbb` was made by that commit; `make.py` there tells what each message went through.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import NEVER, Binding, Listener, Message, Outbox, Reason
from outbox.core.events import Handled, Relayed
from outbox.transports.http import HttpTransport
from tests.support.broker import VirtualHost
from tests.support.databases import DATABASES
from tests.support.http_sink import HttpSink
from tests.support.observing import Recorder, eventually

from .strategies import Effects

DATA = Path(__file__).parents[1] / "data/outbox_63c9fbb"


# No released version has known MariaDB.
@pytest.fixture(params=[name for name in DATABASES if not name.startswith("mariadb")])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path, table_name: str) -> AsyncIterator[str]:
    """A database with the old outboxes, on each driver."""
    if request.param == "sqlite":
        file = tmp_path / "old.db"
        connection = sqlite3.connect(file)
        connection.executescript((DATA / "sqlite.sql").read_text())
        connection.close()
        yield f"sqlite+aiosqlite:///{file}"
        return
    server: str = request.getfixturevalue("postgresql_url")
    name = f"old_{table_name}"
    one = await asyncpg.connect(server)
    await one.execute(f'CREATE DATABASE "{name}"')
    old = await asyncpg.connect(server, database=name)
    await old.execute((DATA / "postgresql.sql").read_text())
    await old.close()
    yield f"{server.rpartition('/')[0]}/{name}".replace("postgresql://", f"{request.param}://", 1)
    await one.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    await one.close()


def options(database_url: str, **others: Any) -> dict[str, Any]:
    """The messages are years old: nothing is forgotten because of that."""
    return {"db_engine_url": database_url, "clean_up_after": NEVER, "inbox_retention": NEVER, **others}


@pytest.fixture
async def queues(database_url: str, recorder: Recorder) -> AsyncIterator[Outbox]:
    """The old outbox whose queues are in the database."""
    outbox = Outbox(**options(database_url, table_name="old_queues", poll_interval=0.2, observers=[recorder]))
    yield outbox
    await outbox.close()


async def test_every_message_in_a_queue_is_handled_once(queues: Outbox, recorder: Recorder, table_name: str) -> None:
    effects = Effects(queues, table_name)
    await effects.create()
    attempts: dict[str, int] = {}

    async def bill(body: str, session: AsyncSession, attempt_count: int) -> None:
        attempts[body] = attempt_count
        await session.execute(effects.write(f"billed {body}"))

    async def audit(body: str, session: AsyncSession) -> None:
        await session.execute(effects.write(f"audited {body}"))

    async def find(body: str, session: AsyncSession) -> None:
        await session.execute(effects.write(f"found {body}"))

    listeners = [
        Listener("order.created", bill, queue="billing"),
        Listener("order.#", audit, queue="audit"),
        Listener("parcel.#", find, queue="lost"),
    ]
    assert await queues.check_tables() == []
    assert not await queues.receive(
        "billing", Message(tracking_ids=("received-1",), routing_key="order.created", body=b'"received"')
    )
    expected = {f"billed {body}" for body in ("routed", "leased", "retrying", "waiting", "timer")}
    expected |= {"audited dead", "audited waiting", "audited timer", "found unroutable"}
    async with queues.running(listeners=listeners):
        await recorder.wait_for(Handled, len(expected))
        dead = await eventually(lambda: _dead(queues, 2))
        assert {(json.loads(letter.message.body), letter.reason) for letter in dead} == {
            ("dead", Reason.REJECTED),
            ("expired", Reason.EXPIRED),
        }
        [rejected] = [letter for letter in dead if letter.reason is Reason.REJECTED]
        assert (rejected.queue, rejected.attempt_count) == ("billing", 1)
        assert "no such order" in rejected.error
        assert await queues.dead_letters.replay([rejected.id]) == 1
        await recorder.wait_for(Handled, len(expected) + 1)
    assert Counter(await effects.all()) == Counter([*expected, "billed dead"])
    assert attempts == {"routed": 1, "leased": 1, "retrying": 2, "waiting": 1, "timer": 1, "dead": 1}
    assert {found.state for found in await queues.messages()} == {"handled"}
    assert {*await queues.bindings()} >= {Binding("billing", "order.created"), Binding("audit", "order.#")}
    assert await queues.check_tables() == []


async def test_every_message_of_a_relay_is_published_once(database_url: str, recorder: Recorder) -> None:
    async with HttpSink() as sink:
        outbox = Outbox(
            **options(
                database_url,
                table_name="old_relay",
                transport=HttpTransport(sink.url, secrets=None),
                poll_interval=0.2,
                observers=[recorder],
            )
        )
        assert await outbox.check_tables() == []
        [circuit] = (await outbox.backlog()).circuits
        assert (circuit.state, circuit.failures) == ("open", 1)
        async with outbox.running(relay=True):
            await recorder.wait_for(Relayed, 3)
            [letter] = await outbox.dead_letters.list()
            assert (letter.reason, letter.attempt_count) == (Reason.REFUSED, 1)
            assert await outbox.dead_letters.replay([letter.id]) == 1
            await recorder.wait_for(Relayed, 4)
        published = [request.json["data"] for request in sink.requests]
    assert Counter(published) == Counter(["dead", "leased", "retrying", "waiting"])
    assert {found.state for found in await outbox.messages()} == {"sent"}
    assert [circuit.state for circuit in (await outbox.backlog()).circuits] in ([], ["closed"])
    await outbox.close()


async def _dead(outbox: Outbox, count: int) -> list[Any]:
    found = await outbox.dead_letters.list()
    return found if len(found) >= count else []


async def test_a_topology_is_taken_as_it_is_and_what_is_on_its_way_in_it_is_handled(
    vhost: VirtualHost, recorder: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = json.loads((DATA / "rabbitmq.json").read_text())
    vhost.management.ask("POST", "definitions", vhost.name, **old["definitions"])
    queues, exchanges, bindings = vhost.queues(), vhost.exchanges(), vhost.bindings()
    async with await aio_pika.connect(vhost.url) as connection:
        channel = await connection.channel()
        for found in old["messages"]:
            await _put(channel, found)
    handled: dict[str, tuple[int, str | None, Any]] = {}

    async def bill(body: str, session: AsyncSession, attempt_count: int, message: Message) -> None:
        assert body not in handled
        handled[body] = (attempt_count, message.key, message.headers["tenant"])

    outbox = Outbox(
        db_engine_url=f"sqlite+aiosqlite:///{tmp_path / 'new.db'}",
        transport=vhost.url,
        inbox_retention=NEVER,
        observers=[recorder],
    )
    with caplog.at_level(logging.WARNING, logger="outbox"):
        async with outbox.running(relay=True, listeners=[Listener("order.created", bill, queue="billing")]):
            await recorder.wait_for(Handled, 2)
            [letter] = await outbox.dead_letters.list()
            assert (letter.reason, letter.attempt_count, letter.queue) == (Reason.REJECTED, 1, "billing")
            assert "no such order" in letter.error
            assert await outbox.dead_letters.replay([letter.id]) == 1
            await recorder.wait_for(Handled, 3)
    assert handled == {
        "waiting": (1, None, "acme"),
        "retrying": (2, "customer 7", "acme"),
        "dead": (1, "customer 7", "acme"),
    }
    assert [record.getMessage() for record in caplog.records if record.name.startswith("outbox")] == []
    for before, now in ((queues, vhost.queues()), (exchanges, vhost.exchanges())):
        assert {name: now[name]["arguments"] for name in before} == {
            name: found["arguments"] for name, found in before.items()
        }
    assert all(binding in vhost.bindings() for binding in bindings)
    await outbox.close()


async def _put(channel: Any, found: dict[str, Any]) -> None:
    """Into the queue that it lay in, as it was sent there; what waits for a retry waits no longer."""
    properties = found["properties"]
    message = aio_pika.Message(
        found["payload"].encode(),
        headers=properties.pop("headers", {}),
        expiration=0.1 if ".delay_" in found["queue"] else None,
        **properties,
    )
    exchange = channel.default_exchange
    if found["exchange"]:
        exchange = await channel.get_exchange(found["exchange"], ensure=False)
    async with asyncio.timeout(30):
        await exchange.publish(message, found["routing_key"])
