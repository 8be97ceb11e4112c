"""amqps: a broker is spoken to only if its certificate is trusted, and is for the host that was asked for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from yarl import URL

from outbox import Listener
from outbox.core.errors import ConfigurationError
from outbox.testing.servers import RabbitMQ
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.management import ManagementAway, see
from tests.support.observing import arrival
from tests.support.outboxes import MakeOutbox

from .certificates import make_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls", numbered=True)
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # whoever servers run as may enter it
    make_certificates(folder / "ours", host="localhost")
    make_certificates(folder / "strangers", host="localhost")
    make_certificates(folder / "without key usage", host="localhost", key_usage=False)
    return folder


@pytest.fixture(scope="module")
def broker(certificates: Path) -> Iterator[RabbitMQ]:
    with RabbitMQ(management=False, tls=certificates / "ours") as server:
        yield server


@pytest.fixture
def url(broker: RabbitMQ) -> URL:
    return URL(f"amqps://guest:guest@localhost:{broker.tls_port}/")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_message_walks_over_an_encrypted_connection(
    make_outbox: MakeOutbox, url: URL, certificates: Path
) -> None:
    arrivals: asyncio.Queue[Any] = asyncio.Queue()

    async def on_order(order: Any) -> None:
        arrivals.put_nowait(order)

    outbox = make_outbox(rabbitmq_url=str(url % {"cafile": str(certificates / "ours" / "ca.pem")}))
    async with outbox.running(relay=True, listeners=[Listener("order.*", on_order, queue="orders")]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", "x" * 1_000_000)
        assert len(await arrival(arrivals)) == 1_000_000


@pytest.mark.parametrize("by_hand", [True, False], ids=["by_hand", "plain"])
@pytest.mark.parametrize(
    ("host", "authority", "way_out"),
    [
        ("localhost", None, r"\?cafile=/path/to/ca\.pem"),
        ("localhost", "strangers/ca.pem", r"\?cafile=/path/to/ca\.pem"),
        ("127.0.0.1", "ours/ca.pem", "write a host into rabbitmq_url that the certificate is for"),
        ("localhost", "nowhere/ca.pem", r"cafile.* cannot be read \(No such file"),
        ("localhost", "ours/extensions", "cafile.* cannot be read"),
    ],
    ids=["of an authority nobody knows", "of another authority", "for another host", "no file", "no certificate"],
)
async def test_a_certificate_that_proves_nothing_is_refused_with_a_way_out(
    url: URL, certificates: Path, by_hand: bool, host: str, authority: str | None, way_out: str
) -> None:
    options = {} if authority is None else {"cafile": str(certificates / authority)}
    transport = RabbitmqTransport(url.with_host(host) % options, by_hand=by_hand)
    with pytest.raises(ConfigurationError, match=way_out) as raised:
        await transport.open()
    assert "guest" not in str(raised.value)
    await transport.close()


@pytest.fixture
async def badly_made(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[URL]:
    """A server whose certificate only a strict check refuses; every Python checks strictly here, as 3.13 does."""
    usual = ssl.create_default_context

    def strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = usual(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    unusable = certificates / "without key usage"
    context.load_cert_chain(unusable / "certificate.pem", unusable / "key.pem")
    monkeypatch.setattr(ssl, "create_default_context", strict)
    async with await asyncio.start_server(never, "127.0.0.1", 0, ssl=context) as server:
        yield URL(f"amqps://guest:guest@localhost:{server.sockets[0].getsockname()[1]}/")


@pytest.mark.parametrize("by_hand", [True, False], ids=["by_hand", "plain"])
async def test_an_authority_that_a_strict_check_refuses_is_to_be_made_anew(
    badly_made: URL, certificates: Path, by_hand: bool
) -> None:
    options = {"cafile": str(certificates / "without key usage" / "ca.pem")}
    transport = RabbitmqTransport(badly_made % options, by_hand=by_hand)
    with pytest.raises(ConfigurationError, match="keyUsage=critical,keyCertSign") as raised:
        await transport.open()
    assert "cafile" not in str(raised.value)  # it is named, and it is the right one
    await transport.close()


class Interface(BaseHTTPRequestHandler):
    """A management interface of a broker with nothing in it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")


@pytest.fixture
def management_url(certificates: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "ours" / "certificate.pem", certificates / "ours" / "key.pem")
    with HTTPServer(("127.0.0.1", 0), Interface) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_the_management_interface_is_trusted_like_the_broker(
    management_url: str, url: URL, certificates: Path
) -> None:
    assert (await see(management_url, str(url % {"cafile": str(certificates / "ours" / "ca.pem")}))).queues == {}
    with pytest.raises(ManagementAway, match="certificate verify failed"):
        await see(management_url, str(url))
    with pytest.raises(ManagementAway, match="No such file"):
        await see(management_url, str(url % {"cafile": str(certificates / "nowhere")}))
