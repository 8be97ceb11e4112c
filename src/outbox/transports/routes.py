"""Routes: several destinations in place of one, each with a name, its binding keys and a transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from outbox.core.binding import Binding, check_name
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery, Features, OnRoute, Published, Transport


@dataclass(frozen=True)
class Route:
    """One destination. Its name is that of a queue in the table, from which a relay of its own takes."""

    name: str
    transport: Transport
    binding_keys: tuple[str, ...]

    @property
    def bindings(self) -> list[Binding]:
        return [Binding(self.name, binding_key) for binding_key in self.binding_keys]


class Routes:
    """The transport of an outbox with routes. It publishes nothing itself: each route's relay does."""

    name = "routes"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)
    dead_letters = None

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)

    async def open(self) -> None:
        """Open all at once. One that cannot be opened closes the others: the setup is wrong."""
        opening = [route.transport.open() for route in self.routes]
        ends = await asyncio.gather(*opening, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if errors:
            opened = [route for route, end in zip(self.routes, ends, strict=True) if end is None]
            await asyncio.gather(*(route.transport.close() for route in opened), return_exceptions=True)
            raise errors[0]

    async def close(self) -> None:
        """Close all, whichever fails."""
        ends = await asyncio.gather(*(route.transport.close() for route in self.routes), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def publish(self, messages: Sequence[Message]) -> Published:
        raise ConfigurationError("with routes messages are stored for each destination first: run a relay")

    async def declare(self, listeners: Sequence[Listener]) -> None:
        raise ConfigurationError("routes only publish: a worker needs a transport that delivers")

    def consume(self, listener: Listener, prefetch: int) -> AsyncIterator[Delivery]:
        raise ConfigurationError("routes only publish: a worker needs a transport that delivers")


def route_name(value: object, transport: Transport) -> str:
    """What a route is called: as its transport says, or by the URL without what is secret or may change in it."""
    if isinstance(transport, OnRoute):
        name = transport.route
    elif isinstance(value, str):
        name = url_without_secrets(value)
    else:
        raise ConfigurationError(
            f"a route to {type(value).__name__} has no name: give the transport an attribute `route`, which names its "
            "messages in the table"
        )
    check_name(name, "name of a route")
    return name


def url_without_secrets(url: str) -> str:
    """A URL without user and password, and without its query, which may hold a token or change."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
