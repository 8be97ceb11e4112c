"""Letters: a message of a `.dlq` queue, read as a dead letter, whatever put it there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any
from uuid import UUID

from pamqp import encode

from outbox.core.attempt import Reason
from outbox.core.dead_letter import FIRST_OF_QUEUES, DeadLetter, clean
from outbox.core.errors import Undecodable
from outbox.core.headers import is_brokers
from outbox.core.message import BYTES, Message
from outbox.transports.rabbitmq.channel import Incoming
from outbox.transports.rabbitmq.copies import of_replay
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.headers import (
    ATTEMPT,
    CRASHES,
    CREATED_AT,
    DIED_AT,
    ERROR,
    HISTORY,
    LARGEST_CARRIED,
    LARGEST_PROPERTIES,
    QUEUE,
    REASON,
    Unsendable,
    microseconds,
    too_large,
)

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)  # where it is not written down when it died
_OF_BROKER = {
    "rejected": Reason.REJECTED,
    "expired": Reason.EXPIRED,
    "delivery_limit": Reason.CRASHED,
    "maxlen": Reason.REFUSED,
}
_BY_WORKER = "rejected"  # which it does only where the broker's account of it is the broker's own
_HASH_BITS = 12
_OFTEN = 1_000_000  # times that a letter came back, where its count cannot be read


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter that was taken out and not given back yet."""

    tag: int
    dead: DeadLetter
    home: str  # the queue where it died, as the broker calls it
    properties: bytes  # as they came
    envelope: Envelope | None  # none: it cannot be read
    returned: int  # how often the broker got it back

    @property
    def id(self) -> int:
        return self.dead.id

    @property
    def is_of_unknown_age(self) -> bool:
        """Whether neither a worker nor the broker wrote down when it died."""
        return self.dead.died_at < _NEVER + timedelta(seconds=1)

    def revived(self) -> bytes | None:
        """The properties of its new beginning; none if there is no reading what would have to be carried on.

        What is too large to carry its history goes without.
        """
        if self.envelope is None:
            return None
        message, beginning = self.dead.message, of_replay(self.envelope)
        for headers in (beginning, {**beginning, HISTORY: None}):
            with suppress(Unsendable):
                properties = self.envelope.carried_on(message.routing_key, message, headers)
                if len(properties) <= LARGEST_PROPERTIES:
                    return properties
        return None

    def renewed(self) -> bytes | None:
        """The properties of a copy that says the same and was never given back."""
        if self.envelope is None:
            return self.properties or None
        dead = self.dead
        headers = {
            ATTEMPT: dead.attempt_count,
            CRASHES: dead.crash_count,
            HISTORY: dead.history or None,
            QUEUE: self.home,
            REASON: str(dead.reason),
            ERROR: dead.error,
            DIED_AT: microseconds(dead.died_at),
        }
        try:
            return self.envelope.carried_on(dead.message.routing_key, dead.message, headers)
        except Unsendable:
            return None


def read(queue: str, home: str, incoming: Incoming, largest_body: int) -> Letter:
    """What lies in the dead letters of a listener's queue, which the broker calls `home`. Nothing is too strange."""
    try:
        return _letter(queue, home, incoming, Envelope.read(incoming.properties), largest_body)
    except Exception as error:  # noqa: BLE001 - one letter keeps no other from being listed
        dead = _strange(queue, incoming, None, f"{error}; it can be discarded, and not replayed")
        return Letter(incoming.tag, dead, home, incoming.properties, None, _OFTEN if incoming.redelivered else 0)


def _letter(queue: str, home: str, incoming: Incoming, envelope: Envelope, largest_body: int) -> Letter:
    envelope = _with_id(envelope, incoming.body)
    # From RabbitMQ 4.3 on one count goes on in the next queue, and it is that one which is limited.
    returned = max(envelope.returned_at_most, int(incoming.redelivered))
    death: Mapping[str, Any] = {}
    try:
        death = _death(envelope, home)
        if death.get("queue") == home and (death.get("exchange") or death.get("reason") != _BY_WORKER):
            # As its worker read it: it had not come by the default exchange. Of what no worker rejected, a stranger may
            # have written where it came from.
            envelope = envelope.as_new()
        dead = _known(queue, incoming, envelope, death, largest_body)
    except Undecodable as error:
        dead = _strange(queue, incoming, envelope, str(error), death.get("time"))
        envelope = envelope.without_ours()
    return Letter(incoming.tag, dead, home, incoming.properties, envelope, returned)


def _known(
    queue: str, incoming: Incoming, envelope: Envelope, death: Mapping[str, Any], largest_body: int
) -> DeadLetter:
    message = envelope.message(_first_routing_key(death) or incoming.routing_key, incoming.body)
    died_at = envelope.moment(DIED_AT) or _about(death.get("time"), message.id)
    if CREATED_AT not in envelope.headers and "timestamp" not in envelope.properties:
        message = replace(message, created_at=died_at)
    reason, error = _why(envelope, death, incoming.body, largest_body)
    return DeadLetter(
        id=_id(queue, message.id, died_at),
        message=message,
        queue=queue,
        reason=reason,
        error=error,
        attempt_count=envelope.attempt_count,
        crash_count=envelope.crashes or 0,
        history=envelope.history,
        died_at=died_at,
    )


def _why(envelope: Envelope, death: Mapping[str, Any], body: bytes, largest_body: int) -> tuple[Reason, str]:
    """What its worker wrote; without that, what its worker must have found, or what the broker says."""
    reason = envelope.own(REASON, str)
    if reason is not None:
        return _reason(reason), envelope.own(ERROR, str) or ""
    by_broker = _OF_BROKER.get(str(death.get("reason")), Reason.REJECTED)
    if by_broker is Reason.REJECTED and len(body) > largest_body:
        return Reason.UNDECODABLE, too_large(body, largest_body)
    if by_broker is Reason.REJECTED and envelope.carried_size > LARGEST_CARRIED:
        return Reason.UNDECODABLE, f"its headers have {envelope.carried_size} bytes: no copy of it fits into a frame"
    return by_broker, _told(death)


def _strange(
    queue: str, incoming: Incoming, envelope: Envelope | None, error: str, by_broker: object = None
) -> DeadLetter:
    """Of what cannot be read, the body is known."""
    message_id = (envelope.text("message_id") if envelope else None) or _id_of(incoming.body)
    died_at = _written_down(envelope) or _about(by_broker, message_id + _id_of(incoming.body))
    message = Message(
        routing_key=incoming.routing_key if envelope else queue,
        body=incoming.body,
        content_type=BYTES,
        tracking_ids=(message_id,),
        created_at=died_at,
    )
    return DeadLetter(
        id=_id(queue, message_id, died_at),
        message=message,
        queue=queue,
        reason=Reason.UNDECODABLE,
        error=clean(error),
        attempt_count=1,
        crash_count=0,
        history="",
        died_at=died_at,
    )


def _written_down(envelope: Envelope | None) -> datetime | None:
    try:
        return envelope.moment(DIED_AT) if envelope else None
    except Undecodable:
        return None


def _with_id(envelope: Envelope, body: bytes) -> Envelope:
    """Who published without an id gets one that is the same at every look."""
    if envelope.text("message_id"):
        return envelope
    own = sorted((name, raw) for name, raw in envelope.headers.items() if not is_brokers(name))
    message_id = _id_of(body, *(part for name, raw in own for part in (name.encode(errors="surrogateescape"), raw)))
    return Envelope(envelope.properties | {"message_id": encode.short_string(message_id)}, envelope.headers)


def _id_of(*parts: bytes) -> str:
    return str(UUID(bytes=blake2b(b"\0".join(parts), digest_size=16).digest()))


def _id(queue: str, message_id: str, died_at: datetime) -> int:
    """A number that stays the same while the letter is there, in the order of death."""
    return FIRST_OF_QUEUES + (microseconds(died_at) << _HASH_BITS | _hash(queue, message_id) % (1 << _HASH_BITS))


def _hash(*parts: str) -> int:
    return int.from_bytes(blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).digest(), "big")


def _about(moment: object, message_id: str) -> datetime:
    """The broker tells no more than the second; the rest tells apart those that died in the same one."""
    second = moment if isinstance(moment, datetime) else _NEVER
    return second.replace(microsecond=0) + timedelta(microseconds=_hash(message_id) % 1_000_000)


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError:
        raise Undecodable(f"its header {REASON} is {text!r}, which is no reason") from None


def _death(envelope: Envelope, home: str) -> Mapping[str, Any]:
    """What the broker says of its death: in this queue if it says so, or else of the last one."""
    deaths = envelope.value("x-death") if "x-death" in envelope.headers else []
    known = [each for each in deaths if isinstance(each, dict)] if isinstance(deaths, list) else []
    here = [each for each in known if each.get("queue") == home]
    return next(iter([*here, *known]), {})


def _first_routing_key(death: Mapping[str, Any]) -> str | None:
    keys = death.get("routing-keys") if death.get("exchange") else None  # by the default exchange: its queue's name
    return keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else None


def _told(death: Mapping[str, Any]) -> str:
    if not death:
        return "the reason is not known: it was put here by another program than this library or the broker"
    return clean(f"RabbitMQ moved it here from {death.get('queue')}: {death.get('reason')}")
