"""Letters: what lies in a `.dlq` queue, read as a dead letter, whoever put it there."""

from __future__ import annotations

from collections.abc import Mapping
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
from outbox.transports.rabbitmq.channels import Incoming
from outbox.transports.rabbitmq.properties import (
    ATTEMPT,
    CRASHES,
    CREATED_AT,
    DIED_AT,
    ERROR,
    HISTORY,
    QUEUE,
    REASON,
    Envelope,
    microseconds,
    of_replay,
)

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)  # where nobody wrote down when it died
_OF_BROKER = {
    "rejected": Reason.REJECTED,
    "expired": Reason.EXPIRED,
    "delivery_limit": Reason.CRASHED,
    "maxlen": Reason.REFUSED,
}
_HASH_BITS = 12
_OFTEN = 1_000_000  # times that a letter came back, where its count cannot be read


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter in our hands."""

    tag: int
    dead: DeadLetter
    home: str  # the queue where it died, as the broker calls it
    properties: bytes  # as they came
    envelope: Envelope | None  # none: nobody can read it
    returned: int  # how often the broker got it back

    @property
    def id(self) -> int:
        return self.dead.id

    def revived(self) -> bytes | None:
        """The properties of its new beginning; none if nobody can read what would have to be carried on."""
        if self.envelope is None:
            return None
        message = self.dead.message
        return self.envelope.carried_on(message.routing_key, message, of_replay(self.envelope))

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
        return self.envelope.carried_on(dead.message.routing_key, dead.message, headers)


def read(queue: str, home: str, incoming: Incoming) -> Letter:
    """What lies in the dead letters of a listener's queue, which the broker calls `home`. Nothing is too strange."""
    try:
        envelope = Envelope.read(incoming.properties)
    except Undecodable as error:
        dead = _strange(queue, incoming, None, f"{error}; it can be discarded, and not replayed")
        return Letter(incoming.tag, dead, home, incoming.properties, None, _OFTEN if incoming.redelivered else 0)
    envelope = _with_id(envelope, incoming.body)
    returned = max(envelope.returned, int(incoming.redelivered))
    try:
        dead = _known(queue, incoming, envelope, _death(envelope, home))
    except Undecodable as error:
        envelope = envelope.without_ours()
        dead = _strange(queue, incoming, envelope, str(error))
    return Letter(incoming.tag, dead, home, incoming.properties, envelope, returned)


def _known(queue: str, incoming: Incoming, envelope: Envelope, death: Mapping[str, Any]) -> DeadLetter:
    message = envelope.message(_first_routing_key(death) or incoming.routing_key, incoming.body)
    died_at = envelope.moment(DIED_AT) or _about(death.get("time"), message.id)
    if CREATED_AT not in envelope.headers and "timestamp" not in envelope.properties:
        message = replace(message, created_at=died_at)
    reason = envelope.own(REASON, str)
    return DeadLetter(
        id=_id(queue, message.id, died_at),
        message=message,
        queue=queue,
        reason=_OF_BROKER.get(str(death.get("reason")), Reason.REJECTED) if reason is None else _reason(reason),
        error=(envelope.own(ERROR, str) or "") if reason is not None else _told(death),
        attempt_count=envelope.attempt_count,
        crash_count=envelope.crashes or 0,
        history=envelope.history,
        died_at=died_at,
    )


def _strange(queue: str, incoming: Incoming, envelope: Envelope | None, error: str) -> DeadLetter:
    """Of what cannot be read, the body is known."""
    message_id = (envelope.text("message_id") if envelope else None) or _id_of(incoming.body)
    died_at = _about(None, message_id)
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


def _with_id(envelope: Envelope, body: bytes) -> Envelope:
    """Who published without an id gets one that is the same at every look."""
    if envelope.text("message_id"):
        return envelope
    own = sorted((name, raw) for name, raw in envelope.headers.items() if not is_brokers(name))
    message_id = _id_of(body, *(part for name, raw in own for part in (name.encode(), raw)))
    return Envelope(envelope.properties | {"message_id": encode.short_string(message_id)}, envelope.headers)


def _id_of(*parts: bytes) -> str:
    return str(UUID(bytes=blake2b(b"\0".join(parts), digest_size=16).digest()))


def _id(queue: str, message_id: str, died_at: datetime) -> int:
    """A number that stays the same while the letter lies there, in the order of death."""
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
    keys = death.get("routing-keys")
    return keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else None


def _told(death: Mapping[str, Any]) -> str:
    if not death:
        return "nobody wrote down why: it was put here by something else than this library or the broker"
    return clean(f"RabbitMQ moved it here from {death.get('queue')}: {death.get('reason')}")
