"""What the scenarios share: a peer, and every way to write frames."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.amqp.peer import Peer


@pytest.fixture(params=[True, False], ids=["frames", "aio-pika"])
def by_hand(request: pytest.FixtureRequest) -> bool:
    """Frames written by hand, and the client library's way."""
    return bool(request.param)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with Peer() as peer:
        yield peer
