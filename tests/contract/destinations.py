"""Destinations of the contract of publishing: a server over HTTP, and a function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outbox import Message
from outbox.core.cloudevents import parse
from outbox.testing.publishing_contract import IGNORED, REFUSED
from outbox.transports.function import FunctionTransport
from outbox.transports.http import HttpTransport
from tests.support.http_sink import HttpSink, by_type, hang, status


class HttpDestination:
    """A real server: what it has taken is what it answered with 2xx."""

    def __init__(self, sink: HttpSink, options: dict[str, Any]) -> None:
        self._sink = sink
        self._options = options
        sink.behave(by_type({REFUSED: status(422), IGNORED: hang()}))

    def transport(self) -> HttpTransport:
        return HttpTransport(f"{self._sink.url}/events", source="/shop", timeout=4, concurrency=8, **self._options)

    @property
    def taken(self) -> list[str]:
        found = [parse(request.headers, request.body)[0].message for request in self._sink.requests]
        return [each.id for each in found if each.routing_key not in (REFUSED, IGNORED)]

    async def until_ignored(self) -> None:
        await self._sink.until(1)


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[HttpDestination]:
    async with HttpSink() as sink:
        yield HttpDestination(sink, options)
        assert sink.most_at_once <= 8


class FunctionDestination:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self._ignored = asyncio.Event()

    def transport(self) -> FunctionTransport:
        return FunctionTransport(self._publish)

    async def until_ignored(self) -> None:
        await self._ignored.wait()

    async def _publish(self, message: Message) -> None:
        if message.routing_key == IGNORED:
            self._ignored.set()
            await asyncio.Event().wait()
        if message.routing_key == REFUSED:
            raise ValueError("no")
        self.taken.append(message.id)
