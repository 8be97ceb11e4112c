"""Management: RabbitMQ's HTTP interface, asked for what AMQP does not tell."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from yarl import URL

from outbox.core.binding import Binding
from outbox.core.errors import ConfigurationError
from outbox.core.urls import check_credentials
from outbox.transports.rabbitmq.topology import Names, QueueBinding

PORT, SECURE_PORT = 15672, 15671  # where it listens unless it was told otherwise
MANAGEMENT_WITHIN = 10.0  # seconds for an answer
OK = 200

_MEANING = {
    401: "it does not know this user, or the user has no `management` tag",
    404: "this is another server, or it has no such virtual host",
}


class ManagementAway(Exception):
    """The interface does not answer as it should; the text says how."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a queue holds; none: not told."""

    messages: int | None
    consumers: int | None
    unacknowledged: int | None = None  # counted in `messages` as well, where it is known


@dataclass(frozen=True, slots=True)
class SeenQueue:
    """A queue as it exists."""

    arguments: Mapping[str, object]
    durable: bool
    counts: Counts | None = None  # up to some seconds old; none: the interface has none yet
    policy: Mapping[str, object] = field(default_factory=dict)  # what applies to it by one


@dataclass(frozen=True, slots=True)
class Seen:
    """What a virtual host has, without what every virtual host has."""

    exchanges: Mapping[str, str]  # their types
    queues: Mapping[str, SeenQueue]
    bindings: frozenset[QueueBinding]

    def served(self, names: Names) -> list[str]:
        """The queues of listeners: those whose dead letters have a queue of their own."""
        return sorted(
            binding.routing_key
            for binding in self.bindings
            if binding.exchange == names.dead_letter_exchange
            and binding.queue == names.dead_letter_queue(binding.routing_key)
            and binding.routing_key.startswith(names.queue_prefix)
        )

    def binding_keys(self, names: Names, queue: str) -> tuple[str, ...]:
        """By which routing keys messages get into a queue."""
        found = (each for each in self.bindings if each.exchange == names.exchange and each.queue == queue)
        return tuple(sorted(each.routing_key for each in found))


async def see(management_url: str, broker_url: str, *, within: float = MANAGEMENT_WITHIN) -> Seen:
    """Ask for everything; the broker's URL says who asks and for which virtual host, unless the other one says who."""
    ask = _asking(management_url, broker_url, within)
    exchanges, queues, bindings = [await ask(kind) for kind in ("exchanges", "queues", "bindings")]
    return Seen(
        {each["name"]: each["type"] for each in exchanges},
        {each["name"]: _queue(each) for each in queues},
        frozenset(
            QueueBinding(each["source"], each["destination"], each["routing_key"])
            for each in bindings
            if each["source"] and each["destination_type"] == "queue"
        ),
    )


async def bindings_of(
    queues: Collection[str], management_url: str, broker_url: str, *, within: float = MANAGEMENT_WITHIN
) -> list[QueueBinding]:
    """What these queues are bound to. Each is asked for by itself: a virtual host may have thousands."""
    ask = _asking(management_url, broker_url, within)
    return [
        QueueBinding(each["source"], queue, each["routing_key"])
        for queue in queues
        for each in await ask("queues", queue, "bindings")
        if each["source"]
    ]


async def bindings_of_listeners(
    names: Names, queues: Collection[str], management_url: str, broker_url: str, *, within: float
) -> list[Binding]:
    """What these listeners' queues are bound to, as they call them; ConfigurationError says why it is not told."""
    if not broker_url:
        raise ConfigurationError(
            "the connection to RabbitMQ that was given does not tell its URL, so the management interface cannot "
            "be asked what queues are bound to: set rabbitmq_url instead of rmq_connection"
        )
    listeners = {names.queue(queue): queue for queue in queues}
    try:
        found = await bindings_of(listeners, management_url, broker_url, within=within)
    except ManagementAway as error:
        raise ConfigurationError(
            f"RabbitMQ's management interface does not tell what queues are bound to ({error}): set "
            "rabbitmq_management_url"
        ) from None
    return [Binding(listeners[each.queue], each.routing_key) for each in found if each.exchange == names.exchange]


async def dead_letter_queues(management_url: str, broker_url: str, names: Names) -> list[str]:
    """The listeners' queues that have dead letters of their own, without their prefix."""
    seen = await see(management_url, broker_url)
    return [name.removeprefix(names.queue_prefix) for name in seen.served(names)]


def management_url_of(broker_url: str) -> str:
    """Where the interface of a broker usually is."""
    url = urlsplit(broker_url)
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or "localhost"
    return f"https://{host}:{SECURE_PORT}" if url.scheme == "amqps" else f"http://{host}:{PORT}"


def _asking(management_url: str, broker_url: str, within: float) -> Callable[..., Awaitable[Any]]:
    """Asks for one kind of things of the virtual host, or for what belongs to one of them."""
    vhost = unquote(urlsplit(broker_url).path[1:]) or "/"
    address = management_url or management_url_of(broker_url)
    user = _user(address) or _user(broker_url) or "guest:guest"
    authority = URL(broker_url).query.get("cafile")

    async def ask(kind: str, *more: str) -> Any:
        path = "/".join(quote(part, safe="") for part in (kind, vhost, *more))
        return await asyncio.to_thread(_ask, address, path, user, authority, within)

    return ask


def _queue(queue: Mapping[str, Any]) -> SeenQueue:
    policy = queue.get("effective_policy_definition") or {}  # a list where there is none, by version
    return SeenQueue(queue["arguments"], queue["durable"], _counts(queue), policy)


def _counts(queue: Mapping[str, Any]) -> Counts | None:
    if "messages" not in queue:  # it was made a moment ago, or statistics are switched off
        return None
    return Counts(queue["messages"], queue.get("consumers"), queue.get("messages_unacknowledged"))


def _ask(address: str, path: str, user: str, authority: str | None, within: float) -> Any:
    """Ask that very server. What is sent holds the broker's password: no redirect is followed, no proxy is used."""
    check_credentials(address, "the management interface's URL")
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError("the management interface's URL begins with http:// or https:// and names a host")
    token = base64.b64encode(user.encode()).decode()
    try:
        connection = _connection(url.scheme, url.hostname, url.port, authority, within)
        with closing(connection):
            connection.request("GET", f"{url.path.rstrip('/')}/api/{path}", headers={"Authorization": f"Basic {token}"})
            with connection.getresponse() as answer:
                if answer.status != OK:
                    raise ManagementAway(f"{answer.status}, {_meaning(answer.status, answer.reason)}")
                content = answer.read()
    except (OSError, HTTPException, ValueError) as error:
        raise ManagementAway(str(error) or type(error).__name__) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ManagementAway("its answer is no JSON") from None


def _connection(scheme: str, host: str, port: int | None, authority: str | None, within: float) -> HTTPConnection:
    if scheme == "http":
        return HTTPConnection(host, port, timeout=within)
    return HTTPSConnection(host, port, timeout=within, context=ssl.create_default_context(cafile=authority))


def _meaning(status: int, reason: str) -> str:
    if 300 <= status < 400:
        return (
            "it redirects, and no redirect is followed, because the request holds the broker's password: name the "
            "address to which it leads"
        )
    return _MEANING.get(status, reason)


def _user(address: str) -> str:
    url = urlsplit(address)
    return f"{unquote(url.username)}:{unquote(url.password or '')}" if url.username else ""
