"""Routes: several destinations in place of one, each with a name, its binding keys and a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from outbox.core.backoff import TRANSPORT
from outbox.core.binding import check_name
from outbox.core.errors import ConfigurationError
from outbox.core.events import Event, Observer, Recovered, Troubled
from outbox.core.message import Message
from outbox.core.store import IN_ROUTES
from outbox.core.transport import Features, Published, Report, Route, Transport, unreported


class Routes(Transport):
    """The transport of an outbox with routes. It publishes nothing itself: each route's relay does."""

    name = IN_ROUTES
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)

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

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        raise ConfigurationError("with routes messages are stored for each destination first: run a relay")


class RouteObserver:
    """Tells of a route's transport under the route's name: an outage of one destination is none of another."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self.route = ""  # known when the transport was made

    def __call__(self, event: Event) -> None:
        if isinstance(event, Troubled | Recovered):
            where = f"{event.where} of {self.route}"
            of = {TRANSPORT: self.route, event.where: where}.get(event.outage_of or "", event.outage_of)
            event = replace(event, where=where, outage_of=of)
        self._observe(event)


def route_name(value: object, transport: Transport) -> str:
    """What a route is called: as its transport says, or by the URL without what is secret or may change in it."""
    name = transport.route
    if name is None and isinstance(value, str):
        name = url_without_secrets(value)
    if name is None:
        raise ConfigurationError(
            f"a route to {type(value).__name__} has no name: write a function with `async def`, or give the transport "
            "an attribute `route`, which names its messages in the table"
        )
    check_name(name, "name of a route")
    return name


def url_without_secrets(url: str) -> str:
    """A URL without user and password, and without its query, which may hold a token or change."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
