"""Intake: one request, from its first byte to rows that are durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from outbox.core.binding import Bindings, first_match
from outbox.core.errors import SignatureInvalid, named
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import DISCARD, Store
from outbox.core.webhooks import ID, verify
from outbox.inbound.http.answer import Declined, Receive, Scope, not_now
from outbox.inbound.http.gathering import AGAIN, Gathering
from outbox.inbound.http.reading import as_messages
from outbox.inbound.http.request import Request, read
from outbox.inbound.http.terms import Terms
from outbox.inbound.inbox import Memory


async def together(storing: Sequence[Awaitable[None]]) -> None:
    """All at once; most requests are for one queue, and need no task of their own for it."""
    if len(storing) == 1:
        await storing[0]
    else:
        await asyncio.gather(*storing)


class Intake:
    """Verifies, reads and stores. Whoever is not declined may forget what it sent."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        terms: Terms,
        store: Callable[[], Store],
        memory: Memory,
        *,
        unroutable: Mapping[str, str],
        batch_size: int,
        observe: Observer,
    ) -> None:
        self._terms = terms
        self._memory = memory
        self._unroutable = unroutable
        self._bindings = Bindings(listener.binding for listener in listeners)
        self._new_gathering = partial(Gathering, store, batch_size=batch_size, observe=observe)
        self._gatherings: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gathering]] = WeakKeyDictionary()

    async def take(self, scope: Scope, receive: Receive) -> None:
        """Returns when everything in the request is durable, or was before; raises Declined otherwise."""
        terms = self._terms
        request = await read(scope, receive, largest=terms.max_request_size, within=terms.timeout)
        messages = as_messages(request, self._verified(request), terms.max_body_size)
        await self._store(self._by_queue(messages))

    def _verified(self, request: Request) -> str | None:
        """The webhook's id, if it has one."""
        secrets = self._terms.secrets
        if secrets is None:
            return request.headers.get(ID)
        try:
            return verify(secrets, request.headers, request.body, time.time())
        except SignatureInvalid as error:
            raise Declined(401, str(error)) from None

    def _by_queue(self, messages: Sequence[Message]) -> dict[str, list[Message]]:
        """Where each message goes. One that has to be declined declines the request, before anything is stored."""
        found: dict[str, list[Message]] = {}
        for message in messages:
            queues = self._bindings.queues(message.routing_key)
            if not queues and first_match(self._unroutable, message.routing_key) != DISCARD:
                raise Declined(404, f"nobody listens for {named(message.routing_key)} here")
            too_old = self._memory.refusal(message) if queues else None
            if too_old is not None:
                raise Declined(422, f"{named(message.routing_key)}: {too_old}")
            for queue in queues:
                found.setdefault(queue, []).append(message)
        return found

    def gathering(self, queue: str) -> Gathering:
        """Where messages for a queue wait in this event loop: none of another could wake whoever waits for them."""
        gatherings = self._gatherings.setdefault(asyncio.get_running_loop(), {})
        found = gatherings.get(queue)
        if found is None:
            found = gatherings[queue] = self._new_gathering(queue)
        return found

    async def _store(self, by_queue: Mapping[str, Sequence[Message]]) -> None:
        """Each queue in a transaction of its own. If one fails, all come again, and those of the others are known."""
        timeout = self._terms.timeout
        try:
            async with asyncio.timeout(timeout):
                await together([self.gathering(queue).add(each) for queue, each in by_queue.items()])
        except TimeoutError:
            raise not_now(f"the database did not answer within {timeout:g} s", AGAIN) from None
