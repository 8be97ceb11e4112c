"""Reading: a request as messages, whose ids tell copies from each other, whatever sends them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256

from outbox.core.cloudevents import ReceivedEvent, parse
from outbox.core.errors import (
    BodyTooLarge,
    CloudEventInvalid,
    CloudEventUnsupported,
    MessageError,
    TooManyEvents,
    named,
)
from outbox.core.message import Message, check, check_message_ids
from outbox.core.store import Seal
from outbox.core.webhooks import ID
from outbox.inbound.http.request import Request
from outbox.inbound.http.response import Declined

_TRACED = ("traceparent", "tracestate")  # headers of a plain webhook that go on with its message


@dataclass(frozen=True, slots=True)
class Read:
    """The messages in a request, and what made them these and is not signed."""

    messages: list[Message]
    way: tuple[str, ...]

    def seal(self, marks: tuple[str, ...]) -> Seal:
        """What keeps a request whose id is known by these marks from being read in another way."""
        return Seal(marks, json.dumps(self.way))


def read(request: Request, webhook_id: str | None, largest_body: int) -> Read:
    """What a request brings: the events in it, or one webhook."""
    if request.mode == "webhook":
        found = Read([_of_webhook(request, webhook_id)], (request.mode, request.endpoint))
    else:
        events = _events(request)
        unsigned = (events[0].message.routing_key, events[0].source) if request.mode == "binary" else ()
        found = Read([_of_event(event) for event in events], (request.mode, *unsigned))
    for message in found.messages:
        _check(message, largest_body)
    return found


def inbox_id(kind: str, sender: str, id: str) -> str:
    """The id by which the inbox knows a message from outside: of equal ids of two senders it makes two."""
    return sha256(json.dumps([kind, sender, id]).encode()).hexdigest()


def _events(request: Request) -> list[ReceivedEvent]:
    try:
        return parse(request.headers, request.body)
    except CloudEventUnsupported as error:
        raise Declined(415, str(error)) from None
    except TooManyEvents as error:
        raise Declined(413, str(error)) from None
    except CloudEventInvalid as error:
        raise Declined(400, str(error)) from None


def _of_event(event: ReceivedEvent) -> Message:
    """The sender's own id stays: it is the last of those that led here."""
    message = event.message
    return replace(message, tracking_ids=(*message.tracking_ids, inbox_id("event", event.source, message.id)))


def _of_webhook(request: Request, id: str | None) -> Message:
    if not id:
        raise Declined(400, f"no CloudEvent, and no webhook either: the header {ID} is missing")
    content_type = request.headers.get("content-type", "")
    if not content_type.partition(";")[0].strip().lower().endswith(("/json", "+json")):
        raise Declined(415, f"a webhook's body is JSON: content-type {named(content_type)} is not taken")
    return Message(
        routing_key=_routing_key(request),
        body=request.body,
        content_type=content_type,
        headers={ID: id, **{name: request.headers[name] for name in _TRACED if name in request.headers}},
        tracking_ids=(id, inbox_id("webhook", request.endpoint, id)),
    )


def _routing_key(request: Request) -> str:
    try:
        document = json.loads(request.body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Declined(400, "the body is no JSON") from None
    if request.path:
        return request.path
    kind = document.get("type") if isinstance(document, dict) else None
    if not isinstance(kind, str) or not kind:
        raise Declined(400, "no routing key: the body has no `type`; add one, or put the key at the end of the path")
    return kind


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _check(message: Message, largest_body: int) -> None:
    try:
        check(message, largest_body)
        check_message_ids(message)
    except BodyTooLarge as error:
        raise Declined(413, str(error)) from None
    except MessageError as error:
        raise Declined(400, str(error)) from None
