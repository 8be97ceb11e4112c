"""Secrets: passwords and tokens, however they were written, are in nothing that is shown, logged or raised."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import stat
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from outbox import ConfigurationError, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.transport import Defaults
from outbox.testing.ladder import DOWNLOADS, Absent, from_debian
from outbox.transports.rabbitmq.management import ManagementAway, see
from tests.walk.commands import Command

CANARY = "canary-7hX2"
SIGNING = base64.b64encode(CANARY.ljust(32, "x").encode()).decode()
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
    "management, no URL": {"transport": f"amqp://{NOWHERE}/", "rabbitmq_management_url": f"{CANARY}:{CANARY}"},
    "basic": {"transport": f"https://shop:{CANARY}@{NOWHERE}/hook"},
    "token": {"transport": f"https://{NOWHERE}/hook?token={CANARY}"},
    "basic in a route": {"routes": json.dumps({"#": f"https://shop:{CANARY}@{NOWHERE}/hook"})},
    "token in a route": {"routes": json.dumps({"#": f"https://{NOWHERE}/hook?token={CANARY}"})},
    "no such transport": {"transport": f"nonsense://shop:{CANARY}@broker/"},
    "webhook secret": {"transport": f"https://{NOWHERE}/hook", "webhook_secrets": f"whsec_{SIGNING}"},
    "webhook secret, malformed": {"transport": f"https://{NOWHERE}/hook", "webhook_secrets": CANARY},
}
KINDS: dict[str, Mapping[str, str]] = {
    **{f"database, {name}": {"db_engine_url": url} for name, url in DATABASES.items()},
    **TRANSPORTS,
}
COMMANDS = (
    ("status", "--interval", "0"),
    ("status", "--interval", "0", "--json"),
    ("doctor",),
    ("doctor", "--json"),
    ("topology", "shop_of_secrets:listeners"),
    ("topology", "shop_of_secrets:listeners", "--format", "json"),
    ("dead-letters", "list"),
    ("tables", "check"),
)


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
def test_no_command_shows_a_secret_of_its_settings(shop: str, tmp_path: Path, kind: str) -> None:
    settings = {f"OUTBOX_{name.upper()}": value for name, value in {"db_engine_url": shop, **KINDS[kind]}.items()}
    command = Command(tmp_path, settings)
    for arguments in COMMANDS:
        ran = command.run_now(*arguments)
        assert_secret(ran.said)
        assert "Traceback" not in ran.said


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
    assert_secret(repr(Defaults(management_url=f"http://shop:{CANARY}@broker:15672")))
    message = Message(routing_key="order.created", body=CANARY.encode(), headers={"a": "b"})
    assert_secret(repr(message) + repr([message]))
    assert f"body=<{len(CANARY)} bytes>" in repr(message) and "routing_key='order.created'" in repr(message)
    assert_secret(repr(Outbox(db_engine_url=DATABASES["password"]).settings))


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
