"""Endpoint: where a broker is, and how a connection to it is made."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import unquote, urlsplit

import aiormq
from aio_pika.abc import AbstractConnection, AbstractRobustConnection
from yarl import URL

from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable
from outbox.core.events import Observer
from outbox.core.urls import check_credentials
from outbox.transports.rabbitmq.aiormq_channel import AiormqConnection
from outbox.transports.rabbitmq.channel import BrokerConnection
from outbox.transports.rabbitmq.connection import Connect, SupervisedConnection, refusal
from outbox.transports.rabbitmq.connection_logging import quieted
from outbox.transports.rabbitmq.frames import FrameConnection

HEARTBEAT = 10  # seconds, if the URL has none: a connection that is silent for three times as long is dead


class Endpoint:
    """A URL, or a connection of the application's own."""

    def __init__(self, where: str | URL | AbstractConnection, observe: Observer, *, by_hand: bool) -> None:
        self.given = where if isinstance(where, AbstractConnection) else None
        self.text = "" if isinstance(where, AbstractConnection) else str(where)  # as it was written
        self._url = None if isinstance(where, AbstractConnection) else _parsed(where)
        self._observe = observe
        self._by_hand = by_hand

    @property
    def url(self) -> str:
        """With user and password; empty for a connection that was given and does not tell its URL."""
        return str(self._where or "")

    @property
    def tls(self) -> ssl.SSLContext | None:
        """With which a connection that was given was made; a URL says by itself what it needs."""
        context: ssl.SSLContext | None = getattr(self.given, "kwargs", {}).get("context")
        return context

    @property
    def _where(self) -> URL | None:
        url: URL | None = self._url or getattr(self.given, "url", None)
        return url

    @property
    def address(self) -> str:
        """The broker and its virtual host; nothing for a connection that does not tell."""
        url = self._where
        if url is None:
            return ""
        port = url.port or (5671 if url.scheme == "amqps" else 5672)
        return f"{url.scheme}://{url.host}:{port}{url.path or '/'}"

    @property
    def virtual_host(self) -> str:
        return unquote(urlsplit(self.text).path[1:]) or "/"

    def supervised(self, role: str) -> SupervisedConnection:
        """A supervised connection, not open yet."""
        connect: Connect = self._connect_given if self.given is not None else partial(self._connect, role)
        return SupervisedConnection(connect, name=f"RabbitMQ {role}", observe=self._observe)

    async def connect_by_hand(self, role: str) -> FrameConnection:
        with self._explained() as url:
            return await FrameConnection.connect(url, f"outbox {role}")

    async def _connect(self, role: str) -> BrokerConnection:
        if self._by_hand:
            return await self.connect_by_hand(role)
        with self._explained() as url:
            connection = aiormq.Connection(url)
            await connection.connect()
            return AiormqConnection(connection, ours=True)

    async def _connect_given(self) -> BrokerConnection:
        given = self.given
        assert given is not None  # noqa: S101 - an endpoint without one has a URL
        comes_back = isinstance(given, AbstractRobustConnection)
        if given.is_closed or (not comes_back and not given.connected.is_set()):
            raise TransportClosed("the connection to RabbitMQ that was given as rmq_connection is closed for good")
        await given.connected.wait()
        if given.transport is None:
            raise TransportUnavailable("the connection that was given is not open")
        return AiormqConnection(given.transport.connection)

    @contextmanager
    def _explained(self) -> Iterator[URL]:
        url = self._url
        assert url is not None  # noqa: S101 - an endpoint without one has a connection
        try:
            with quieted():
                yield url
        except Exception as error:  # noqa: BLE001 - what it means is told without the URL
            raise refusal(error, f"RabbitMQ at {url.host}:{url.port}") from None


def _parsed(text: str | URL) -> URL:
    """An error does not repeat the URL: it may hold a password."""
    check_credentials(str(text), "rabbitmq_url")
    try:
        url = URL(text)
        port = url.port
    except ValueError:
        url, port = URL(""), None
    if url.scheme not in ("amqp", "amqps") or not url.host:
        raise ConfigurationError(
            "rabbitmq_url is no URL of RabbitMQ: write for example amqp://user:password@host:5672/"
        )
    if "heartbeat" not in url.query:
        url = url.update_query(heartbeat=HEARTBEAT)
    return url.with_port(port or (5671 if url.scheme == "amqps" else 5672))
