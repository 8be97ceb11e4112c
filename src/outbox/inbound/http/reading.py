"""Reading: a request as messages, whose ids tell copies from each other whoever sends them."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256

from outbox.core.cloudevents import Received, is_cloud_event, parse
from outbox.core.errors import BodyTooLarge, CloudEventInvalid, CloudEventUnsupported, MessageError, named
from outbox.core.message import Message, check, check_message_ids
from outbox.core.webhooks import ID
from outbox.inbound.http.answer import Declined
from outbox.inbound.http.request import Request

_TRACED = ("traceparent", "tracestate")  # headers of a plain webhook that go on with its message


def as_messages(request: Request, webhook_id: str | None, largest_body: int) -> list[Message]:
    """What a request brings: the events in it, or one webhook."""
    if is_cloud_event(request.headers):
        messages = [_of_event(event) for event in _events(request)]
    else:
        messages = [_of_webhook(request, webhook_id)]
    for message in messages:
        _check(message, largest_body)
    return messages


def inbox_id(kind: str, sender: str, id: str) -> str:
    """The id by which the inbox knows a message from outside: of equal ids of two senders it makes two."""
    return sha256(json.dumps([kind, sender, id]).encode()).hexdigest()


def _events(request: Request) -> list[Received]:
    try:
        return parse(request.headers, request.body)
    except CloudEventUnsupported as error:
        raise Declined(415, str(error)) from None
    except CloudEventInvalid as error:
        raise Declined(400, str(error)) from None


def _of_event(event: Received) -> Message:
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
        document = json.loads(request.body)
    except (ValueError, RecursionError):
        raise Declined(400, "the body is no JSON") from None
    if request.path:
        return request.path
    kind = document.get("type") if isinstance(document, dict) else None
    if not isinstance(kind, str) or not kind:
        raise Declined(400, "no routing key: the body has no `type`; add one, or put the key at the end of the path")
    return kind


def _check(message: Message, largest_body: int) -> None:
    try:
        check(message, largest_body)
        check_message_ids(message)
    except BodyTooLarge as error:
        raise Declined(413, str(error)) from None
    except MessageError as error:
        raise Declined(400, str(error)) from None
