"""Listening without a worker: a callback called with a real delivery, or refused before one comes."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from outbox import ConfigurationError, Listener, Message
from outbox.core.transport import Delivery
from outbox.inbound.arguments import Arguments
from outbox.transports.memory import MemoryTransport

SESSION = object()  # stands where a session would: nothing here touches a database


class Order(BaseModel):
    id: int


async def delivered(listener: Listener, body: bytes) -> Delivery:
    """A real delivery of the listener's queue."""
    transport = MemoryTransport()
    await transport.declare([listener])
    await transport.publish([Message(routing_key="order.created", body=body, tracking_ids=("entry", "this"))])
    return await anext(transport.consume(listener, 1))


async def call(callback: Callable[..., Any], body: bytes = b'{"id":1}') -> Any:
    """What the callback returns when a message is handed to it as a worker would."""
    listener = Listener("order.*", callback, queue="orders")
    arguments = Arguments.of(listener)
    delivery = await delivered(listener, body)
    session = SESSION if arguments.session is not None else None
    returned = arguments.call(callback, arguments.bind(delivery), session)
    return await returned if arguments.is_async else returned


def refused(callback: Callable[..., Any]) -> str:
    """The text with which a callback is refused before any message is touched."""
    with pytest.raises(ConfigurationError) as caught:
        Arguments.of(Listener("order.*", callback, queue="orders"))
    assert "orders" in str(caught.value), "the text says which listener"
    return str(caught.value)
