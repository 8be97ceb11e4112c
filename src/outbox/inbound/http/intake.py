"""Intake: one request, from its first byte to rows that are durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from outbox.core.binding import Bindings, first_match
from outbox.core.cloudevents import binary_id
from outbox.core.errors import CloudEventInvalid, SignatureInvalid, named
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import DISCARD, Seal, Store
from outbox.core.webhooks import ID, ClaimedSignature, Verified, claimed, header_id, verified
from outbox.inbound.http.bodies import Bodies
from outbox.inbound.http.options import HttpAppOptions
from outbox.inbound.http.reading import read
from outbox.inbound.http.request import MODES, Mode, Request, RequestHead, head_of
from outbox.inbound.http.request_storage import AFTER_OUTAGE, RequestPart, RequestStorage
from outbox.inbound.http.response import Declined, Receive, Scope, not_now
from outbox.inbound.inbox import Memory

AFTER_CROWD = 1  # seconds after which a sender may try again what came while too many others were stored

_IN_WORDS: Mapping[Mode, str] = {
    "structured": "a CloudEvent in structured mode",
    "binary": "a CloudEvent in binary mode",
    "webhook": "a webhook that is no CloudEvent",
}


async def together(storing: Sequence[Awaitable[None]]) -> None:
    """All at once; most requests are for one queue, and need no task of their own for it."""
    if len(storing) == 1:
        await storing[0]
    elif storing:
        await asyncio.gather(*storing)


@dataclass(slots=True)
class _Here:
    """What belongs to one event loop: nothing of another could be waited for."""

    bodies: Bodies
    storages: dict[str, RequestStorage] = field(default_factory=dict)


class Intake:
    """Verifies, reads and stores. A sender that is not declined may forget what it sent."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        options: HttpAppOptions,
        store: Callable[[], Store],
        memory: Memory,
        *,
        unroutable: Mapping[str, str],
        batch_size: int,
        observe: Observer,
    ) -> None:
        self._options = options
        self._memory = memory
        self._unroutable = unroutable
        self._bindings = Bindings(listener.binding for listener in listeners)
        self._first_queue = listeners[0].queue
        self._new_storage = partial(RequestStorage, store, batch_size=batch_size, observe=observe)
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Here] = WeakKeyDictionary()
        self._storing = 0  # requests

    async def take(self, scope: Scope, receive: Receive) -> None:
        """Returns when everything in the request is durable, or was before; raises Declined otherwise."""
        head = head_of(scope, self._options.max_request_size)
        claim = self._claimed(head)
        body = await self._here().bodies.read(scope, receive)
        request = Request(head.endpoint, head.path, head.headers, body)
        webhook = self._verified(claim, request)
        found = read(request, webhook.id, self._options.max_body_size)
        seal = found.seal(webhook.marks) if self._options.seals else None
        await self._store(self._by_queue(found.messages), seal)

    def _claimed(self, head: RequestHead) -> ClaimedSignature | None:
        """Decline what would be declined whatever the body is; what the request says of its signature."""
        if head.mode not in self._options.modes:
            taken = " or ".join(_IN_WORDS[mode] for mode in MODES if mode in self._options.modes)
            raise Declined(415, f"{_IN_WORDS[head.mode]} is not taken here: send {taken}")
        if self._options.secrets is None:
            return None
        try:
            claim = claimed(head.headers, time.time())
        except SignatureInvalid as error:
            raise Declined(401, str(error)) from None
        if head.mode == "binary" and not _is_id(claim.id, head.headers):
            raise Declined(401, f"ce-id is not what was signed: in binary mode {ID} is the event's id, percent-encoded")
        return claim

    def _verified(self, claim: ClaimedSignature | None, request: Request) -> Verified:
        """The webhook's id, if it has one."""
        if self._options.secrets is None or claim is None:
            return Verified(request.headers.get(ID, ""), ())
        try:
            return verified(self._options.secrets, claim, request.body)
        except SignatureInvalid as error:
            raise Declined(401, str(error)) from None

    def _by_queue(self, messages: Sequence[Message]) -> dict[str, list[Message]]:
        """Where each message goes. One that has to be declined declines the request, before anything is stored."""
        found: dict[str, list[Message]] = {}
        for message in messages:
            queues = self._bindings.queues(message.routing_key)
            if not queues and first_match(self._unroutable, message.routing_key) != DISCARD:
                raise Declined(404, f"no listener matches {named(message.routing_key)} here")
            too_old = self._memory.refusal(message) if queues else None
            if too_old is not None:
                raise Declined(422, f"{named(message.routing_key)}: {too_old}")
            for queue in queues:
                found.setdefault(queue, []).append(message)
        return found

    def storage(self, queue: str) -> RequestStorage:
        """Where messages for a queue wait in this event loop."""
        storages = self._here().storages
        found = storages.get(queue)
        if found is None:
            found = storages[queue] = self._new_storage(queue)
        return found

    def _here(self) -> _Here:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            options = self._options
            bodies = Bodies(largest=options.max_request_size, most_at_once=options.most_at_once, within=options.timeout)
            found = self._by_loop[loop] = _Here(bodies)
        return found

    async def _store(self, by_queue: Mapping[str, Sequence[Message]], seal: Seal | None) -> None:
        """Each queue in a transaction of its own. If one fails, all come again, and those of the others are known."""
        if self._storing >= self._options.most_at_once:
            raise not_now(f"{self._options.most_at_once} requests are being stored already", AFTER_CROWD)
        if seal is not None and not by_queue:
            by_queue = {self._first_queue: ()}  # no queue wants what is in it, and it must not become something else
        timeout = self._options.timeout
        self._storing += 1
        try:
            async with asyncio.timeout(timeout):
                await together([self.storage(queue).store(RequestPart(each, seal)) for queue, each in by_queue.items()])
        except TimeoutError:
            raise not_now(f"the database did not answer within {timeout:g} s", AFTER_OUTAGE) from None
        finally:
            self._storing -= 1


def _is_id(webhook_id: str, headers: Mapping[str, str]) -> bool:
    """Whether it is the event's id, as it is or percent-encoded: with a % only the latter, so that it names one id."""
    try:
        id = binary_id(headers)
        return webhook_id == (header_id(id) if "%" in webhook_id else id)
    except CloudEventInvalid as error:
        raise Declined(400, str(error)) from None
