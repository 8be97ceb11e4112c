"""FunctionTransport: an application's own `async def publish(message)` as the transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from outbox.core.cancellation import cancelled_from_outside
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery, Features, Published, Refusal

WITHIN = 20.0  # seconds for one message; less than the relay gives to the whole batch


class FunctionTransport:
    """Returning means sent, raising means not sent."""

    name = "function"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)
    dead_letters = None

    def __init__(self, publish: Callable[[Message], Awaitable[object]]) -> None:
        self._publish = publish

    @property
    def route(self) -> str:
        """The function's own name."""
        name = getattr(self._publish, "__name__", "")
        if not name.isidentifier():
            raise ConfigurationError("a function without a name cannot be a route: write it with `async def`")
        return name

    async def open(self) -> None:
        """The function connects by itself."""

    async def close(self) -> None:
        """And so it closes."""

    async def publish(self, messages: Sequence[Message]) -> Published:
        confirmed: set[str] = set()
        refused: dict[str, Refusal] = {}
        await asyncio.gather(*(self._one(message, confirmed, refused) for message in messages))
        return Published(frozenset(confirmed), refused)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        raise ConfigurationError("a function only publishes: a worker needs a transport that delivers")

    def consume(self, listener: Listener, prefetch: int) -> AsyncIterator[Delivery]:
        raise ConfigurationError("a function only publishes: a worker needs a transport that delivers")

    async def _one(self, message: Message, confirmed: set[str], refused: dict[str, Refusal]) -> None:
        try:
            async with asyncio.timeout(WITHIN):
                await self._publish(message)
        except TimeoutError:
            pass  # in doubt, and only this one: what the others answered counts
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            # A client library that dies cancels what it was doing: in doubt, which means published again.
        except Exception as error:  # noqa: BLE001 - whatever it raises means: not sent
            refused[message.id] = Refusal(f"{type(error).__name__}: {error}")
        else:
            confirmed.add(message.id)
