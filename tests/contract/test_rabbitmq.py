"""RabbitMQ keeps the contract of transports, with frames of our own and with the client library alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aio_pika
import pytest

from outbox.testing.transport_contract import MakeTransport, TransportContract
from outbox.transports.rabbitmq import RabbitmqTransport


class TestRabbitmqTransport(TransportContract):
    @pytest.fixture
    def make_transport(self, rabbitmq_url: str) -> MakeTransport:
        return lambda: RabbitmqTransport(rabbitmq_url)


class TestPlainRabbitmqTransport(TransportContract):
    @pytest.fixture
    def make_transport(self, rabbitmq_url: str) -> MakeTransport:
        return lambda: RabbitmqTransport(rabbitmq_url, by_hand=False)


class TestRabbitmqTransportOnAGivenConnection(TransportContract):
    @pytest.fixture
    async def make_transport(self, rabbitmq_url: str) -> AsyncIterator[MakeTransport]:
        connection = await aio_pika.connect(rabbitmq_url)
        yield lambda: RabbitmqTransport(connection)
        assert connection.connected.is_set()  # whoever gave it still has it
        await connection.close()
