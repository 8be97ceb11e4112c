"""HTTP in both modes, with a signature and without, and functions keep the contract of those who only publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outbox import Message
from outbox.core.cloudevents import parse
from outbox.core.webhooks import Secrets
from outbox.testing.publishing_contract import IGNORED, REFUSED, PublishingContract
from outbox.transports import function
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


class TestHttpTransport(PublishingContract):
    @pytest.fixture
    async def destination(self) -> AsyncIterator[HttpDestination]:
        async with listening() as destination:
            yield destination


class TestSignedHttpTransport(PublishingContract):
    @pytest.fixture
    async def destination(self) -> AsyncIterator[HttpDestination]:
        async with listening(secrets=Secrets(bytes(32))) as destination:
            yield destination


class TestBinaryHttpTransport(PublishingContract):
    @pytest.fixture
    async def destination(self) -> AsyncIterator[HttpDestination]:
        async with listening(mode="binary") as destination:
            yield destination


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


class TestFunctionTransport(PublishingContract):
    @pytest.fixture
    async def destination(self, monkeypatch: pytest.MonkeyPatch) -> FunctionDestination:
        monkeypatch.setattr(function, "CALLED_WITHIN", 0.5)
        return FunctionDestination()
