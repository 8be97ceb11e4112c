"""Rows of another program: what cannot be read is dead-lettered alone, and everything else goes on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import make_url

from outbox import Listener, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.dead_letter import DeadLetter
from outbox.core.events import Troubled
from outbox.stores.rows import LARGEST
from outbox.transports.http import HttpTransport
from tests.support.broker import VirtualHost
from tests.support.commands import Command
from tests.support.http_sink import Behaviour, Connection, HttpSink, Request, answer
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

from .rows import (
    COUNTS,
    GROUPS,
    HEADERS,
    KINDS,
    NOT_UTF_8,
    SENT,
    SETUPS,
    UNDECODABLE,
    UNTYPED,
    WAITS,
    Kind,
    NotUtf8,
    ordinary_row,
)

ORDINARY = 60
WITHIN = 15.0  # seconds for the ordinary ones: three times the 5 that are promised, as with all recovery times here
ASYNCPG, PSYCOPG, SQLITE = "postgresql+asyncpg", "postgresql+psycopg", "sqlite"
BERLIN = quote("-c TimeZone=Europe/Berlin")  # psycopg answers in the session's time zone

Seen = Counter[tuple[str, str]]  # how often each body came, by the queue or destination


class Scene:
    """A table that strangers write to, and where what is sent from it arrives."""

    def __init__(self, outbox: Outbox, url: str, seen: Seen, queues: tuple[str, ...], recorder: Recorder) -> None:
        self.outbox = outbox
        self.seen = seen
        self.recorder = recorder
        self._queues = queues
        self._url = make_url(url)
        self._numbers = iter(range(10**6))

    async def insert(self, kinds: Mapping[str, Kind], **columns: Any) -> None:
        """Rows of these kinds, each with its name as its body."""
        await asyncio.to_thread(self._insert, [self._row(name, kind, columns) for name, kind in kinds.items()])

    async def sixty(self) -> None:
        """Ordinary messages are sent or handled in every queue in time, each once."""
        first = next(self._numbers) * ORDINARY
        bodies = [json.dumps(first + number) for number in range(ORDINARY)]
        began = time.monotonic()
        async with self.outbox.transaction() as session:
            await self.outbox.emit_many(session, "other.ordinary", [json.loads(body) for body in bodies])
        wanted = {(queue, body) for queue in self._queues for body in bodies}
        await eventually(lambda: wanted <= self.seen.keys())
        assert time.monotonic() - began < WITHIN
        assert all(self.seen[each] == 1 for each in wanted)

    async def fates(self, kinds: Mapping[str, Kind], setup: str) -> None:
        """Every row has the fate of its kind."""
        expected = {name: kind.fate_in(setup) for name, kind in kinds.items()}

        async def found() -> dict[str, str]:
            letters = {name_of(letter.message.body): letter.reason.value for letter in await self.letters()}
            sent = {json.loads(body) for queue, body in self.seen if queue == self._queues[0] and body.startswith('"')}
            return {name: letters.get(name) or (SENT if name in sent else WAITS) for name in kinds}

        deadline = time.monotonic() + WITHIN
        while (fates := await found()) != expected and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert fates == expected

    async def letters(self) -> list[DeadLetter]:
        return await self.outbox.dead_letters.list(queue=None, limit=10_000)

    def _row(self, name: str, kind: Kind, columns: Mapping[str, Any]) -> dict[str, Any]:
        ordinary = ordinary_row(f"stranger {next(self._numbers)}", "bad.row", name)
        return ordinary | dict(columns) | dict(kind.columns)

    def _insert(self, rows: list[dict[str, Any]]) -> None:
        table = self.outbox.tables.messages.name
        sqlite = self._url.get_backend_name() == "sqlite"
        connect: Any = sqlite3.connect if sqlite else psycopg.connect
        plain = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        with closing(connect(self._url.database if sqlite else plain)) as connection:
            for row in rows:
                marks = ", ".join(mark(value) if sqlite else "%s" for value in row.values())
                values = [value.bytes if isinstance(value, NotUtf8) else value for value in row.values()]
                connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", values)
            connection.commit()


def mark(value: object) -> str:
    return "CAST(? AS TEXT)" if isinstance(value, NotUtf8) else "?"


def name_of(body: bytes) -> str:
    try:
        return str(json.loads(body))
    except ValueError:
        return ""


def listeners(seen: Seen) -> list[Listener]:
    """One queue gets everything, the other one ordinary messages."""

    def listener(queue: str, binding_key: str) -> Listener:
        async def handle(body: bytes) -> None:
            seen[queue, body.decode()] += 1

        return Listener(binding_key, handle, queue=queue)

    return [listener("same", "#"), listener("other", "other.#")]


Start = Callable[[str], Awaitable[Scene]]


@pytest.fixture
async def start(make_outbox: MakeOutbox, database_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """Starts a set-up by its name."""
    url = f"{database_url}?options={BERLIN}" if "psycopg" in database_url else database_url
    async with AsyncExitStack() as stack:

        async def start(setup: str) -> Scene:
            seen: Seen = Counter()
            queues: tuple[str, ...] = ("same", "other")
            recorder = Recorder()
            options: dict[str, Any] = {"relay": True}
            settings: dict[str, Any] = {"db_engine_url": url, "observers": [recorder], "lease": 3}

            async def publish(message: Message) -> None:
                seen["same", message.body.decode()] += 1

            if setup == "function":
                queues, settings["transport"] = ("same",), publish
            elif setup in ("http", "http-binary"):
                sink = await stack.enter_async_context(HttpSink())
                sink.behave(counting(seen))
                mode = HttpTransport(sink.url, mode="binary" if setup == "http-binary" else "structured")
                queues, settings["transport"] = ("same",), mode
            else:
                options = {"listeners": listeners(seen)}
                if setup == "rabbitmq":
                    vhost: VirtualHost = request.getfixturevalue("vhost")
                    options["relay"], settings["rabbitmq_url"] = True, vhost.url
            outbox = make_outbox(**settings)
            await outbox.create_tables()
            await stack.enter_async_context(outbox.running(**options))
            return Scene(outbox, database_url, seen, queues, recorder)

        yield start


def counting(seen: Seen) -> Behaviour:
    """Takes every event, and counts it by the body of its message."""

    async def behave(request: Request, connection: Connection) -> bool:
        body = request.body.decode()
        if "ce-specversion" not in request.headers:
            event = request.json
            body = b64decode(event["data_base64"]).decode() if "data_base64" in event else json.dumps(event["data"])
        seen["same", body] += 1
        await connection.send(answer(200))
        return True

    return behave


@pytest.mark.parametrize(
    ("setup", "database_url"),
    [
        ("worker", ASYNCPG),
        ("worker", PSYCOPG),
        ("function", ASYNCPG),
        ("function", PSYCOPG),
        ("http", PSYCOPG),
        ("http-binary", PSYCOPG),
        ("rabbitmq", ASYNCPG),
        ("sqlite", SQLITE),
    ],
    indirect=["database_url"],
)
async def test_a_row_that_cannot_be_read_dies_alone(start: Start, setup: str, database_url: str) -> None:
    """In each set-up ordinary messages come after each kind; with another driver or mode, after each group of them."""
    assert len(KINDS) >= 29 and setup in SETUPS
    scene = await start(setup)
    for kinds in GROUPS.values():
        one_by_one = setup == "http" or (setup != "http-binary" and "psycopg" not in database_url)
        for some in [{name: kind} for name, kind in kinds.items()] if one_by_one else [kinds]:
            await scene.insert(some)
            await scene.sixty()
        await scene.fates(kinds, setup)
    assert not scene.recorder.of(Troubled)


@pytest.mark.parametrize("database_url", [ASYNCPG, PSYCOPG, SQLITE], indirect=True)
async def test_a_row_that_names_its_queue_dies_alone(start: Start) -> None:
    scene = await start("worker")
    kinds = COUNTS | {name: kind for name, kind in KINDS.items() if kind.fate_in("worker") == UNDECODABLE}
    await scene.insert(kinds, destination="same")
    await scene.sixty()
    await scene.fates(kinds, "queue")
    assert not scene.recorder.of(Troubled)


@pytest.mark.parametrize(
    ("setup", "database_url"),
    [("worker", ASYNCPG), ("function", ASYNCPG), ("worker", PSYCOPG), ("function", PSYCOPG), ("sqlite", SQLITE)],
    indirect=["database_url"],
)
async def test_what_is_larger_than_any_message_is_not_even_read(
    start: Start, setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL cannot send a row of a gigabyte, and whoever may insert rows may write one."""
    for name in LARGEST:
        monkeypatch.setitem(LARGEST, name, 100_000)
    large = "x" * 100_001
    kinds = {
        "body": Kind({"body": large.encode()}),
        "headers": Kind({"headers": json.dumps({"a": large})}),
        "tracking ids": Kind({"tracking_ids": json.dumps([large])}),
    }
    scene = await start(setup)
    await scene.insert(kinds)
    await scene.sixty()

    async def letters() -> list[DeadLetter]:
        found = await scene.letters()
        return found if len(found) == len(kinds) else []

    await eventually(letters)
    found = await letters()
    assert {letter.reason.value for letter in found} == {UNDECODABLE}
    assert {name_of(letter.message.body) for letter in found} == {"", "headers", "tracking ids"}
    assert all(len(letter.message.body) + len(str(letter.message.headers)) < 1000 for letter in found)
    assert not scene.recorder.of(Troubled)
    await scene.insert(kinds, due_at="2100-01-01 00:00:00.000000")
    waiting = await scene.outbox.messages()
    assert [bool(stored.error) for stored in waiting] == [True] * 3
    assert [name_of(stored.message.body) for stored in waiting] == ["", "headers", "tracking ids"]


@pytest.mark.parametrize("database_url", [SQLITE], indirect=True)
async def test_a_value_of_another_type_stops_no_queue_of_sqlite(
    start: Start, make_outbox: MakeOutbox, database_url: str, table_name: str
) -> None:
    outbox = make_outbox()
    await outbox.create_tables()
    await Scene(outbox, database_url, Counter(), (), Recorder()).insert(UNTYPED)
    await can_be_listed(outbox, database_url, table_name)
    scene = await start("sqlite")
    await scene.sixty()
    await scene.fates({name: kind for name, kind in UNTYPED.items() if not name.startswith("body")}, "sqlite")
    assert len([each for each in await scene.letters() if each.message.body == b""]) == 2
    assert not scene.recorder.of(Troubled)
    await can_be_listed(outbox, database_url, table_name)


async def can_be_listed(outbox: Outbox, database_url: str, table_name: str) -> None:
    """Every text is one, and every command ends by itself."""
    for stored in await outbox.messages(limit=1000):
        assert {type(stored.queue), type(stored.timer_id), type(stored.history)} <= {str, type(None)}
    assert "b'same'" in [queue.queue for queue in (await outbox.backlog()).queues]
    command = Command(Path(), {"OUTBOX_DB_ENGINE_URL": database_url, "OUTBOX_TABLE_NAME": table_name})
    lists = [["messages", "list", *more, "--limit", "1000"] for more in ([], ["--json"])]
    for words in (
        *lists,
        ["status", "--interval", "0", "--json"],
        ["doctor", "--json"],
        ["dead-letters", "list", "--json"],
    ):
        ran = await command.run(*words)
        assert (ran.code in (ExitCode.FINE, ExitCode.UNHEALTHY), "Traceback" in ran.said) == (True, False)


@pytest.mark.parametrize("database_url", [SQLITE], indirect=True)
async def test_a_text_that_is_not_utf_8_dies_alone_and_is_listed(
    start: Start, make_outbox: MakeOutbox, database_url: str
) -> None:
    outbox = make_outbox()
    await outbox.create_tables()
    scene = Scene(outbox, database_url, Counter(), (), Recorder())
    elsewhere = {"destination": Kind({"destination": NotUtf8(b"queue \xff")}, WAITS)}
    await scene.insert(NOT_UTF_8 | elsewhere)
    waiting = await outbox.messages()
    assert [name_of(stored.message.body) for stored in waiting] == [*NOT_UTF_8, *elsewhere]
    unreadable = {name for name, kind in NOT_UTF_8.items() if kind.fate == UNDECODABLE}
    assert {name_of(stored.message.body) for stored in waiting if stored.error} == unreadable
    assert [queue.queue for queue in (await outbox.backlog()).queues] == ["queue \\xff"]

    running = await start("sqlite")
    await running.sixty()
    await running.fates(NOT_UTF_8 | elsewhere, "sqlite")
    assert not running.recorder.of(Troubled)
    for letter in await running.letters():
        assert await outbox.dead_letters.show(letter.id) == letter


@pytest.mark.parametrize("database_url", [ASYNCPG, PSYCOPG, SQLITE], indirect=True)
async def test_what_cannot_be_read_is_shown_as_that(
    make_outbox: MakeOutbox, database_url: str, table_name: str, start: Start
) -> None:
    """In lists of messages while it waits, and in those of dead letters afterwards."""
    url = f"{database_url}?options={BERLIN}" if "psycopg" in database_url else database_url
    command = Command(Path(), {"OUTBOX_DB_ENGINE_URL": url, "OUTBOX_TABLE_NAME": table_name})
    outbox = make_outbox(db_engine_url=url)
    await outbox.create_tables()
    scene = Scene(outbox, database_url, Counter(), (), Recorder())
    strange = "sqlite" if "sqlite" in url else ""  # it takes some of these times for others
    kinds = {name: kind for name, kind in KINDS.items() if strange not in kind.elsewhere}
    await scene.insert(kinds)
    waiting = await outbox.messages(limit=1000)
    assert [name_of(stored.message.body) for stored in waiting] == list(kinds)
    unreadable = {name_of(stored.message.body) for stored in waiting if stored.error}
    assert {name for name, kind in HEADERS.items() if kind.fate == UNDECODABLE} <= unreadable
    for stored in waiting:
        assert await outbox.find(stored.message.id)
    assert (await outbox.backlog()).waiting == len(kinds)
    if "psycopg" in url:
        for words in (["messages", "list", "--body", "--limit", "1000"], ["status", "--interval", "0"], ["doctor"]):
            ran = await command.run(*words)
            assert (ran.code in (ExitCode.FINE, ExitCode.UNHEALTHY), "Traceback" in ran.said) == (True, False)
        for name in ("headers: a list", "created_at: year 20000"):
            shown = [stored.message.id for stored in waiting if name_of(stored.message.body) == name]
            ran = await command.run("messages", "show", *shown)
            assert (ran.code, "its row cannot be read" in ran.stdout) == (ExitCode.FINE, True)

    running = await start("function")
    dead = {name: kind for name, kind in kinds.items() if kind.fate not in (SENT, WAITS)}
    await running.fates(kinds, "function")
    letters = await outbox.dead_letters.list(limit=1000)
    assert {name_of(letter.message.body) for letter in letters} == dead.keys()
    for letter in letters:
        assert await outbox.dead_letters.show(letter.id) == letter
    if "psycopg" in url:
        for words in (["list", "--body", "--limit", "1000"], ["list", "--json"], ["show", str(letters[0].id)]):
            ran = await command.run("dead-letters", *words)
            assert (ran.code, "Traceback" in ran.said) == (ExitCode.FINE, False)
    assert await outbox.dead_letters.replay([letter.id for letter in letters]) == len(letters)
    await running.sixty()
    still = {name: kind for name, kind in dead.items() if name not in COUNTS and kind.fate == UNDECODABLE}
    await running.fates(still, "function")
