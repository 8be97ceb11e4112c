"""Receiving: the functions that store a message from elsewhere in a queue, with and without an event loop."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, overload

from sqlalchemy.ext.asyncio import AsyncSession

from outbox.core.callers_line import CallersLine
from outbox.core.message import Message
from outbox.emitting import Emitting
from outbox.inbound.receiver import Unwanted
from outbox.outbound.emitter import awaited, transaction_of
from outbox.outbound.sessions import AnySession, PlainSession


class Receiving(Emitting):
    """What an outbox offers to those who take messages from elsewhere."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A session of the outbox's own engine, begun."""

    @overload
    async def receive(self, queue: str, message: Message, *, unwanted: Unwanted = "dead") -> bool: ...
    @overload
    async def receive(
        self, session: AnySession, /, queue: str, message: Message, *, unwanted: Unwanted = "dead"
    ) -> bool: ...
    @overload
    async def receive(
        self, queue: str, message: Message, *, session: AnySession | None, unwanted: Unwanted = "dead"
    ) -> bool: ...
    async def receive(self, *place: Any, unwanted: Unwanted = "dead", **named: Any) -> bool:
        """Store a message from elsewhere in a queue of the database, once by its id; False if it was there before.

        `receive(session, queue, message)` does so in the session's transaction; after `receive(queue, message)` it is
        committed. If no listener has the queue, the message is a dead letter, or waits for one with
        `unwanted="wait"`. The keyword `session=` is deprecated: pass the session first.
        """
        session, queue, message = _arranged(place, named)
        receiver = self._parts.receiver
        receiver.check(queue, message, unwanted)
        around: AbstractAsyncContextManager[AnySession]
        around = self.transaction() if session is None else nullcontext(session)
        async with around as own:
            transaction = transaction_of(own, awaits=True)
            return await awaited(transaction, receiver.receive, transaction, queue, message, unwanted)

    @overload
    def receive_sync(
        self, session: PlainSession, /, queue: str, message: Message, *, unwanted: Unwanted = "dead"
    ) -> bool: ...
    @overload
    def receive_sync(
        self, queue: str, message: Message, *, session: PlainSession, unwanted: Unwanted = "dead"
    ) -> bool: ...
    def receive_sync(self, *place: Any, unwanted: Unwanted = "dead", **named: Any) -> bool:
        """`receive(session, queue, message)` for callers without an event loop.

        The keyword `session=` is deprecated: pass the session first.
        """
        session, queue, message = _arranged(place, named)
        if session is None:
            raise TypeError("receive_sync() needs a session: receive_sync(session, queue, message)")
        receiver = self._parts.receiver
        receiver.check(queue, message, unwanted)
        return receiver.receive(transaction_of(session, awaits=False), queue, message, unwanted)


def _arranged(place: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, str, Message]:
    """The session, None if there is none, the queue and the message."""

    def receive(session: Any, queue: str, message: Message) -> tuple[Any, str, Message]:
        return session, queue, message

    if "session" in named:
        CallersLine.here().warn("session= is deprecated: write receive(session, queue, message)", DeprecationWarning)
        place = (named.pop("session"), *place)
    elif len(place) + len(named) == 2:
        place = (None, *place)
    return receive(*place, **named)  # too many or too few are refused by Python itself
