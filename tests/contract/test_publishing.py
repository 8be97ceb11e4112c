"""HTTP in both modes, with a signature and without, and functions keep the contract of those who only publish."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outbox.core.webhooks import Secrets
from outbox.testing.publishing_contract import PublishingContract
from outbox.transports import function
from tests.contract.destinations import FunctionDestination, HttpDestination, listening


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


class TestFunctionTransport(PublishingContract):
    @pytest.fixture
    async def destination(self, monkeypatch: pytest.MonkeyPatch) -> FunctionDestination:
        monkeypatch.setattr(function, "CALLED_WITHIN", 0.5)
        return FunctionDestination()
