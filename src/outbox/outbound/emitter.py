"""Emitter: writes messages in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from outbox.core import body as bodies
from outbox.core.cloudevents import SOURCE
from outbox.core.durations import LATEST, NO_DELAY, Eta, Seconds, as_due, as_lifetime
from outbox.core.errors import HeaderInvalid, TimeInvalid
from outbox.core.events import Emitted, Observer
from outbox.core.headers import is_reserved
from outbox.core.message import Message, Schedule, check, check_timer_id, is_media_type
from outbox.core.store import Store
from outbox.core.urls import check_uri_reference
from outbox.outbound.sessions.lookup import transaction_of
from outbox.outbound.sessions.session_types import AnySession, PlainSession

Key = str | Callable[[Any], str] | None


class Emitter:
    """Turns what callers say into messages and hands them to the store of the caller's database."""

    def __init__(
        self,
        stores: Mapping[str, Store],  # by the name of a dialect
        *,
        expiration: timedelta | None,
        max_body_size: int,
        observe: Observer,
    ) -> None:
        self._stores = stores
        self._expiration = expiration
        self._max_body_size = max_body_size
        self._observe = observe

    def message(
        self,
        routing_key: str,
        body: object,
        key: Key,
        headers: Mapping[str, str] | None,
        content_type: str | None,
        source: str | None,
    ) -> Message:
        """A checked message."""
        encoded, default_type = bodies.encode(body, routing_key)
        message = Message(
            routing_key=routing_key,
            body=encoded,
            content_type=content_type or default_type,
            headers=_as_headers(headers, source),
            key=key(body) if callable(key) else key,
        )
        check(message, self._max_body_size)
        if content_type:
            _check_media_type(content_type)
        _check_names(message.headers)
        return message

    def schedule(self, eta: Eta | None, expiration: Seconds | None, timer_id: str | None) -> Schedule:
        """When a message is due and until when it is worth delivering."""
        if timer_id is not None:
            check_timer_id(timer_id)
        lifetime = self._expiration if expiration is None else as_lifetime(expiration)
        due = NO_DELAY if eta is None else as_due(eta)
        if isinstance(due, datetime) and lifetime is not None and lifetime >= LATEST - due:
            raise TimeInvalid(f"expiration ends too late, in the year {LATEST.year} or after: {lifetime} from {due}")
        return Schedule(due=due, expiration=lifetime, timer_id=timer_id)

    async def write(self, session: AnySession, messages: list[Message], schedule: Schedule) -> bool:
        """Write messages; False if the timer already waits."""
        transaction = transaction_of(session, awaits=True)
        if not messages:
            return True
        store = self._stores[transaction.dialect.name]
        written = await transaction.run(transaction.emit, store, messages, schedule)
        if written:
            self._observe(Emitted(messages))
        return written

    def write_now(self, session: PlainSession, messages: list[Message], schedule: Schedule) -> bool:
        """The same for a caller without an event loop."""
        transaction = transaction_of(session, awaits=False)
        if not messages:
            return True
        written = transaction.emit(self._stores[transaction.dialect.name], messages, schedule)
        if written:
            self._observe(Emitted(messages))
        return written

    async def cancel(self, session: AnySession, timer_id: str) -> bool:
        """Delete the timer if it still waits; says whether it did."""
        check_timer_id(timer_id)
        transaction = transaction_of(session, awaits=True)
        return await transaction.run(transaction.cancel, self._stores[transaction.dialect.name], timer_id)

    def cancel_now(self, session: PlainSession, timer_id: str) -> bool:
        """The same for a caller without an event loop."""
        check_timer_id(timer_id)
        transaction = transaction_of(session, awaits=False)
        return transaction.cancel(self._stores[transaction.dialect.name], timer_id)


def _as_headers(headers: Mapping[str, str] | None, source: str | None) -> dict[str, str]:
    if headers is not None and not isinstance(headers, Mapping):
        raise HeaderInvalid(f"headers are a mapping of names to values, not {type(headers).__name__}")
    found = dict(headers or {})
    if source is None:
        return found
    if source == "" or found.get(SOURCE, source) != source:
        raise HeaderInvalid(f"source is not empty, and the header {SOURCE!r} is the same thing: give one of them")
    return {**found, SOURCE: source}


def _check_media_type(content_type: str) -> None:
    """Only of what is emitted: a broker's messages from elsewhere are taken as they are."""
    if not is_media_type(content_type):
        raise HeaderInvalid(f"content type {content_type!r} is no media type: write for example 'text/plain'")


def _check_names(headers: Mapping[str, str]) -> None:
    """Refuse what only a message from outside may be called: RabbitMQ would not take it from us."""
    for name in headers:
        if is_reserved(name):
            raise HeaderInvalid(
                f"header name {name!r} has a meaning of its own: CC, BCC and what begins with outbox- or x-opt- is "
                "reserved, and so are x-outbox-tracking-ids, x-original-routing-key and what RabbitMQ writes itself; "
                "give yours another name"
            )
    if SOURCE in headers:
        check_uri_reference(headers[SOURCE], "source", HeaderInvalid)
