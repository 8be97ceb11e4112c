"""Intake: one request, from its first byte to rows that are durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final

from outbox.core.binding import Bindings, first_match
from outbox.core.errors import ConfigurationError, SignatureInvalid, named
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import LARGEST_HEADERS, Message
from outbox.core.store import DISCARD, Store
from outbox.core.webhooks import ID, Secrets, verify
from outbox.inbound.http.answer import Declined, Receive, Scope, not_now
from outbox.inbound.http.gathering import AGAIN, Gathering
from outbox.inbound.http.reading import as_messages
from outbox.inbound.http.request import Request, read
from outbox.inbound.inbox import Memory

AnySecrets = Secrets | str | bytes | Iterable[str | bytes]


class Required(Enum):
    """What stands where somebody has to decide."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


def chosen(secrets: AnySecrets | Required | None) -> Secrets | None:
    """The secrets that were given; none only if somebody said so."""
    if isinstance(secrets, Required):
        raise ConfigurationError(
            "http_app() needs the secrets that its senders sign with: secrets='whsec_…', or several for a rotation; "
            "secrets=None takes whatever anybody sends, for senders that are known by other means"
        )
    return None if secrets is None else Secrets.of(secrets)


def largest_request(max_body_size: int) -> int:
    """What a message of the largest size may come to as an event: in base64, with all the headers it may have."""
    return 2 * max_body_size + 4 * LARGEST_HEADERS


def limit(name: str, value: int) -> int:
    """A number of something, given to http_app()."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: a whole number, at least 1")
    return value


class Intake:
    """Verifies, reads and stores. Whoever is not declined may forget what it sent."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        secrets: Secrets | None,
        store: Callable[[], Store],
        *,
        memory: Memory,
        unroutable: Mapping[str, str],
        max_body_size: int,
        max_request_size: int,
        batch_size: int,
        timeout: float,
        observe: Observer,
    ) -> None:
        self._secrets = secrets
        self._memory = memory
        self._unroutable = unroutable
        self._max_body_size = max_body_size
        self._max_request_size = max_request_size
        self._timeout = timeout
        self._bindings = Bindings(listener.binding for listener in listeners)
        self._gatherings = {
            listener.queue: Gathering(store, listener.queue, batch_size=batch_size, observe=observe)
            for listener in listeners
        }

    async def take(self, scope: Scope, receive: Receive) -> None:
        """Returns when everything in the request is durable, or was before; raises Declined otherwise."""
        request = await read(scope, receive, largest=self._max_request_size, within=self._timeout)
        messages = as_messages(request, self._verified(request), self._max_body_size)
        await self._store(self._by_queue(messages))

    def _verified(self, request: Request) -> str | None:
        """The webhook's id, if it has one."""
        if self._secrets is None:
            return request.headers.get(ID)
        try:
            return verify(self._secrets, request.headers, request.body, time.time())
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

    async def _store(self, by_queue: Mapping[str, Sequence[Message]]) -> None:
        """Each queue in a transaction of its own. If one fails, all come again, and those of the others are known."""
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.gather(*(self._gatherings[queue].add(each) for queue, each in by_queue.items()))
        except TimeoutError:
            raise not_now(f"the database did not answer within {self._timeout:g} s", AGAIN) from None
