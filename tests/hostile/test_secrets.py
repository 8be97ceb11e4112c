"""Secrets: passwords and tokens, however they were written, are in nothing that is shown, logged or raised."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import os
import sqlite3
import stat
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import select

from outbox import ConfigurationError, Listener, Message, Outbox
from outbox.cli import logs, serving
from outbox.cli.exits import ExitCode
from outbox.core.transport import Defaults
from outbox.core.webhooks import Secrets, sign
from outbox.shutdown import Shutdown
from outbox.testing.servers.ladder import DOWNLOADS, Absent, from_debian
from outbox.transports.http import HttpTransport
from outbox.transports.rabbitmq.management import ManagementAway, see
from outbox.transports.rabbitmq.options import RabbitmqOptions
from tests.support.commands import Command
from tests.support.sending import serving as serving_app

CANARY = "canary-7hX2"
SIGNING = base64.b64encode(CANARY.ljust(32, "x").encode()).decode()
PATH_TOKEN = f"T0K3N{CANARY}"
NOWHERE = "127.0.0.1:1"

# What is set, and how. Each is wrong in some way or leads nowhere, so that errors speak of it.
DATABASES = {
    "password": f"postgresql+asyncpg://shop:{CANARY}@{NOWHERE}/shop",
    "password, psycopg": f"postgresql+psycopg://shop:{CANARY}@{NOWHERE}/shop",
    "password, other spelling": f"postgres://shop:{CANARY}@{NOWHERE}/shop",
    "quoted password": f"postgresql+psycopg://shop:p%40{CANARY}%2F@{NOWHERE}/shop",
    "unquoted @": f"postgresql+asyncpg://shop:first@{CANARY}@{NOWHERE}/shop",
    "unquoted @, psycopg": f"postgresql+psycopg://shop:first@{CANARY}@{NOWHERE}/shop",
    "unquoted @ and /": f"postgresql+psycopg://shop:first@second/{CANARY}@{NOWHERE}/shop",
    "unquoted @ and ?": f"postgresql+psycopg://shop:first@second?{CANARY}@{NOWHERE}/shop",
    "unquoted @, then ?": f"postgresql+psycopg://shop:first@{CANARY}?second@{NOWHERE}/shop",
    "unquoted /": f"postgresql+psycopg://shop:first/{CANARY}@{NOWHERE}/shop",
    "unquoted :": f"postgresql+psycopg://shop:first:{CANARY}@{NOWHERE}/shop",
    "in the query": f"postgresql+asyncpg://{NOWHERE}/shop?user=shop&password={CANARY}",
    "in the query, psycopg": f"postgresql+psycopg://{NOWHERE}/shop?password={CANARY}&nonsense=1",
    "port is a word": f"postgresql://shop:{CANARY}@db:port/shop",
    "no such database": f"nonsense://shop:{CANARY}@db/shop",
    "sqlite with a user": f"sqlite://shop:{CANARY}@db/shop.db",
    "no URL": CANARY,
}
TRANSPORTS: dict[str, Mapping[str, str]] = {
    "amqp": {"transport": f"amqp://shop:{CANARY}@{NOWHERE}/"},
    "amqps": {"transport": f"amqps://shop:{CANARY}@{NOWHERE}/"},
    "amqp, unquoted /": {"transport": f"amqp://shop:12/{CANARY}@{NOWHERE}/"},
    "amqp, unquoted @": {"transport": f"amqp://shop:first@{CANARY}@{NOWHERE}/"},
    "amqp, unquoted @ and /": {"transport": f"amqp://shop:first@second/{CANARY}@{NOWHERE}/"},
    "amqp, unquoted @, then ?": {"transport": f"amqp://shop:first@{CANARY}?second@{NOWHERE}/"},
    "amqp, unquoted #": {"transport": f"amqp://shop:12#{CANARY}@{NOWHERE}/"},
    "amqp, unquoted ?": {"transport": f"amqp://shop:12?{CANARY}@{NOWHERE}/"},
    "amqp in a route": {"routes": json.dumps({"#": f"amqp://shop:12/{CANARY}@{NOWHERE}/"})},
    "management": {
        "transport": f"amqp://{NOWHERE}/",
        "rabbitmq_management_url": f"http://shop:{CANARY}@{NOWHERE}",
    },
    "management, unquoted /": {
        "transport": f"amqp://{NOWHERE}/",
        "rabbitmq_management_url": f"http://shop:12/{CANARY}@{NOWHERE}",
    },
    "management, a letter like /": {
        "transport": f"amqp://{NOWHERE}/",
        "rabbitmq_management_url": f"http://shop:{CANARY}\u2100@{NOWHERE}",
    },
    "management, no host": {"transport": f"amqp://{NOWHERE}/", "rabbitmq_management_url": f"http://shop:{CANARY}"},
    "management, no URL": {"transport": f"amqp://{NOWHERE}/", "rabbitmq_management_url": f"{CANARY}:{CANARY}"},
    "basic": {"transport": f"https://shop:{CANARY}@{NOWHERE}/hook"},
    "token": {"transport": f"https://{NOWHERE}/hook?token={CANARY}"},
    "basic in a route": {"routes": json.dumps({"#": f"https://shop:{CANARY}@{NOWHERE}/hook"})},
    "token in a route": {"routes": json.dumps({"#": f"https://{NOWHERE}/hook?token={CANARY}"})},
    "token in the path": {"transport": f"https://{NOWHERE}/hook/{PATH_TOKEN}"},
    "token in the path, quoted": {"transport": f"https://{NOWHERE}/hook/{PATH_TOKEN}%2F%C3%A9/end"},
    "token in the path of a route": {"routes": json.dumps({"#": f"https://{NOWHERE}/hook/{PATH_TOKEN}"})},
    "no such transport": {"transport": f"nonsense://shop:{CANARY}@broker/"},
    "webhook secret": {"transport": f"https://{NOWHERE}/hook", "webhook_secrets": f"whsec_{SIGNING}"},
    "webhook secret, malformed": {"transport": f"https://{NOWHERE}/hook", "webhook_secrets": CANARY},
}
KINDS: dict[str, Mapping[str, str]] = {
    **{f"database, {name}": {"db_engine_url": url} for name, url in DATABASES.items()},
    **TRANSPORTS,
}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", "--interval", "0"),
    ("status", "--interval", "0", "--json"),
    ("doctor",),
    ("doctor", "--json"),
    ("topology", "shop_of_secrets:listeners"),
    ("topology", "shop_of_secrets:listeners", "--server-version", "4.1"),
    ("topology", "shop_of_secrets:listeners", "--server-version", "4.1", "--format", "json"),
    ("dead-letters", "list"),
    ("dead-letters", "list", "--json"),
    ("dead-letters", "show", "1"),
    ("dead-letters", "replay", "--all"),
    ("dead-letters", "discard", "1", "--yes"),
    ("messages", "list"),
    ("messages", "list", "--json", "--body"),
    ("messages", "show", "nothing"),
    ("queues", "list"),
    ("queues", "list", "--json"),
    ("queues", "rebind", "shop_of_secrets:listeners"),
    ("queues", "remove", "billing"),
    ("queues", "release", "billing"),
    ("tables", "create"),
    ("tables", "check"),
    ("tables", "sql"),
    ("tables", "sql", "--roles"),
    ("tables", "switch-transport", "http"),
    ("tables", "switch-transport", "database", "--force", "--json"),
)
# They work until a signal comes.
SERVING: tuple[tuple[str, ...], ...] = (
    ("relay", "--log-level", "debug"),
    ("relay", "--log-level", "debug", "--log-format", "json"),
    ("worker", "shop_of_secrets:listeners", "--log-level", "debug"),
    ("worker", "shop_of_secrets:listeners", "--log-level", "debug", "--log-format", "json"),
)
FOR_A_MOMENT = 0.1  # seconds until the signal


def assert_secret(text: str) -> None:
    for secret in (CANARY, SIGNING, base64.b64encode(f"shop:{CANARY}".encode()).decode()):
        assert secret not in text


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a database with tables, beside a module of listeners."""
    (tmp_path / "shop_of_secrets.py").write_text(
        'from outbox import Listener\n\nlisteners = [Listener("order.*", print, queue="billing")]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    url = f"sqlite:///{tmp_path / 'outbox.db'}"
    assert Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url}).run_now("tables", "create").code == ExitCode.FINE
    return url


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_shows_a_secret_of_its_settings(
    shop: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {f"OUTBOX_{name.upper()}": value for name, value in {"db_engine_url": shop, **KINDS[kind]}.items()}
    command = Command(tmp_path, settings)
    with asyncio.Runner() as runner:
        runner.run(emit(shop))
    monkeypatch.setattr("outbox.transports.rabbitmq.START_WITHIN", 0.1)
    with signalled_soon():
        for arguments in SERVING:
            ran = command.run_now(*arguments)
            assert ran.said
            assert_secret(ran.said)
    for arguments in COMMANDS:
        ran = command.run_now(*arguments)
        assert_secret(ran.said)
        assert "Traceback" not in ran.said
    assert_secret("\n".join(sqlite3.connect(shop.removeprefix("sqlite:///")).iterdump()))


async def emit(shop: str) -> None:
    outbox = Outbox(db_engine_url=shop)
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {})
    await outbox.close()


@contextmanager
def signalled_soon() -> Iterator[None]:
    """A relay or a worker gets its signal after a moment, and logs as it does in a process of its own."""

    @contextmanager
    def on_signals() -> Iterator[Shutdown]:
        shutdown = Shutdown()
        asyncio.get_running_loop().call_later(FOR_A_MOMENT, shutdown.signal)
        yield shutdown

    def start_logging(*arguments: Any) -> None:
        logging.root.handlers = []  # otherwise it takes those of pytest for an application's own
        logs.start_logging(*arguments)

    threshold, handlers, level = gc.get_threshold(), logging.root.handlers, logging.root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "on_signals", on_signals)
        for module in ("relay", "worker"):
            patch.setattr(f"outbox.cli.{module}.start_logging", start_logging)
        try:
            yield
        finally:
            logging.root.handlers = handlers
            logging.root.setLevel(level)
            gc.set_threshold(*threshold)
            gc.unfreeze()


async def test_no_answer_of_http_app_shows_a_secret(shop: str) -> None:
    async def handle(body: bytes) -> None:
        raise ValueError(body)

    secret = f"whsec_{SIGNING}"
    outbox = Outbox(db_engine_url=shop, webhook_secrets=secret, log=False)
    app = outbox.http_app([Listener("order.#", handle, queue="billing")], secrets=secret)
    now = int(time.time())
    body = json.dumps({"specversion": "1.0", "id": "1", "source": "/s", "type": "order.created", "data": 1}).encode()
    right = sign(Secrets.of(secret), "1", now, body)
    requests: list[tuple[dict[str, str], bytes]] = [
        ({}, body),
        (right | {"webhook-signature": "v1,nonsense"}, body),
        (right | {"webhook-timestamp": "soon"}, body),
        (sign(Secrets.of(secret), "1", now - 100_000, body), body),
        (right, b"{}"),
        (sign(Secrets.of(secret), "2", now, b"{}"), b"{}"),
        (right, body),
        (right | {"content-type": "application/cloudevents+avro"}, body),
    ]
    statuses = []
    async with serving_app(app) as sender:
        for headers, content in requests:
            answer = await sender.post({"content-type": "application/cloudevents+json", **headers}, content)
            statuses.append(answer.status)
            assert_secret(repr(answer))
    await outbox.close()
    assert sorted(set(statuses)) == [202, 400, 401, 415]


@pytest.mark.parametrize("kind", KINDS)
async def test_no_error_no_log_and_no_repr_shows_a_secret_of_its_settings(
    shop: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    given: dict[str, Any] = {"db_engine_url": shop, **KINDS[kind]}
    if "routes" in given:
        given["routes"] = json.loads(given["routes"])
    said: list[str] = []
    outbox: Outbox | None = None
    with told(said):
        outbox = Outbox(**given, poll_interval=0.05, restart_delay=0.05)
        said.append(repr(outbox))
        said.append(repr(outbox.settings))
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {})
        said.append(repr(outbox.transport))
        async with outbox.running(relay=True):
            await asyncio.sleep(0.1)
    if outbox is not None:
        with told(said):
            said.append(repr(await outbox.messages()) + repr(await outbox.backlog()))
        with told(said):
            said.append(repr(await outbox.dead_letters.list()))
        await outbox.close()
    assert said
    assert_secret("\n".join(said))
    assert_secret(caplog.text)


@contextmanager
def told(said: list[str]) -> Iterator[None]:
    """What is raised, as a log would show it: with all that it came from."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it tells no secret
        said.append(repr(error))
        said.extend(line for line in traceback.format_exception(error))


def test_a_password_that_was_cut_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigurationError, match="in a password write @ as %40"):
        Outbox(db_engine_url=DATABASES["unquoted @, psycopg"]).engines.main  # noqa: B018
    with pytest.raises(ConfigurationError, match="in a password write / as %2F"):
        Outbox(transport=TRANSPORTS["amqp, unquoted /"]["transport"]).settings  # noqa: B018


def test_what_an_application_prints_of_its_objects_shows_no_secret_and_no_body() -> None:
    settings = {"rabbitmq_management_url": f"http://shop:{CANARY}@broker:15672"}
    assert_secret(repr(Defaults(settings=settings)))
    assert_secret(repr(Defaults(settings=settings).chosen(RabbitmqOptions)))
    message = Message(routing_key="order.created", body=CANARY.encode(), headers={"a": "b"})
    assert_secret(repr(message) + repr([message]))
    assert f"body=<{len(CANARY)} bytes>" in repr(message) and "routing_key='order.created'" in repr(message)
    assert_secret(repr(Outbox(db_engine_url=DATABASES["password"]).settings))


async def test_neither_a_log_nor_the_tables_nor_doctor_show_the_tokens_of_two_addresses(
    shop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [f"https://{NOWHERE}/hook/{PATH_TOKEN}{number}" for number in range(2)]
    for url in urls:
        outbox = Outbox(db_engine_url=shop, transport=HttpTransport(url, name="chat"))
        async with outbox.running(relay=True):
            pass
        async with outbox.transaction() as session:
            owners = (await session.execute(select(outbox.tables.owners))).all()
        await outbox.close()
        assert "/hook/***" in repr(owners)
        assert_secret(repr(owners))
    assert "its messages go to https://127.0.0.1:1/hook/***" in caplog.text
    assert_secret(caplog.text)
    ran = await Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": shop, "OUTBOX_TRANSPORT": urls[1]}).run("doctor")
    assert "its messages go to" in ran.said
    assert_secret(ran.said)


def test_a_route_without_its_token_keeps_a_name_of_its_own() -> None:
    first, again, other, word = (
        HttpTransport(f"https://hooks.example/hook/{part}/in?x=1").route
        for part in ("T0K3Nxxxxxxxxxx", "T0K3Nxxxxxxxxxx", "T0K3Nxxxxxxxxxy", "orders")
    )
    assert first == again == f"https://hooks.example/hook/***{sha256(b'T0K3Nxxxxxxxxxx').hexdigest()[:8]}/in"
    assert other != first
    assert word == "https://hooks.example/hook/orders/in"


# The management interface.


class Recorder(BaseHTTPRequestHandler):
    """Remembers who asked, and answers with a redirect if there is an address for one."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(HTTPServer):
    status = 200
    location = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Recorder)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """Two of them: the management interface, and another host."""
    with Server() as one, Server() as other:
        threads = [Thread(target=server.serve_forever, args=(0.02,)) for server in (one, other)]
        for thread in threads:
            thread.start()
        yield one, other
        for server, thread in zip((one, other), threads, strict=True):
            server.shutdown()
            thread.join()


BROKER = f"amqp://shop:{CANARY}@127.0.0.1/"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_the_brokers_password_follows_no_redirect(servers: tuple[Server, Server], status: int) -> None:
    interface, other = servers
    interface.status, interface.location = status, f"{other.url}/api"
    with pytest.raises(ManagementAway, match=f"{status}, it redirects, and no redirect is followed") as raised:
        await see(interface.url, BROKER)
    assert interface.asked == [f"Basic {base64.b64encode(f'shop:{CANARY}'.encode()).decode()}"]
    assert other.asked == []
    assert_secret(str(raised.value))


async def test_the_brokers_password_goes_to_no_proxy(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    interface, proxy = servers
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert (await see(interface.url, BROKER)).queues == {}
    assert len(interface.asked) == 3
    assert proxy.asked == []


# What is on the disk, and what comes from elsewhere.


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


@pytest.mark.parametrize("url", ["sqlite:///{}", "sqlite:///file:{}?uri=true"])
async def test_a_sqlite_file_that_the_library_makes_is_for_its_user_alone(tmp_path: Path, url: str) -> None:
    file = tmp_path / "outbox.db"
    before = os.umask(0o022)
    try:
        outbox = Outbox(db_engine_url=url.format(file))
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {})
            assert [mode(file.with_name(file.name + end)) for end in ("", "-wal", "-shm")] == [0o600] * 3
        await outbox.close()
    finally:
        os.umask(before)


async def test_a_sqlite_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "outbox.db"
    file.touch()
    file.chmod(0o640)
    outbox = Outbox(db_engine_url=f"sqlite:///{file}")
    await outbox.create_tables()
    await outbox.close()
    assert mode(file) == 0o640


def test_packages_are_downloaded_only_if_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_CACHE", str(tmp_path))
    monkeypatch.delenv(DOWNLOADS)
    answer = from_debian("some-server", folders="usr/bin")()
    assert answer == Absent(
        "Debian packages: some-server would have to be downloaded: set OUTBOX_TEST_DOWNLOADS=1 to allow that"
    )
