"""CloudEvents: messages as CloudEvents 1.0 over HTTP, and back.

The type is the routing key, the id the message's id, the subject its key, the time when it was made. What CloudEvents
has no attribute for travels in extensions, and so do headers; those that no extension could hold share one.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote, unquote_to_bytes

from pydantic_core import from_json

from outbox.core.binding import check_name
from outbox.core.cloudevents_json import EventReader, JsonEvent
from outbox.core.durations import LATEST, OLDEST
from outbox.core.errors import CloudEventInvalid, CloudEventUnsupported, ConfigurationError, named
from outbox.core.message import BYTES, JSON, Message, is_media_type, kept
from outbox.core.urls import check_uri_reference

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"

SOURCE: Final = "ce-source"  # the header of a message that has a source of its own; every received one has it
DATASCHEMA: Final = "ce-dataschema"

TRACKING_IDS: Final = "outboxtrackingids"
DUE: Final = "outboxduetime"
HEADERS: Final = "outboxheaders"  # headers that are no extensions: a JSON object
EXPIRES: Final = "expirytime"  # CloudEvents' own extension

_VERSION = "1.0"
_REQUIRED = ("specversion", "id", "source", "type")
_OPTIONAL = ("datacontenttype", "dataschema", "subject", "time")
_CORE = frozenset({*_REQUIRED, *_OPTIONAL, "data"})
_OURS = frozenset({TRACKING_IDS, DUE, HEADERS, EXPIRES})
_NAME = re.compile(r"[a-z0-9]+")
_EXTENSION = re.compile(r"[a-z0-9]{1,20}")  # the length that CloudEvents recommends
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef]|[\ufffe\uffff]")  # what no text of CloudEvents contains
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_HALF_ENCODED = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNENCODED = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """A message that came as a CloudEvent, and who sent it: ids are unique only together with their source."""

    message: Message
    source: str


def check_source(source: str) -> None:
    """Refuse what CloudEvents does not take for a source, wherever it is configured."""
    check_name(source, "source")
    check_uri_reference(source, "source", ConfigurationError)


# Out.


def structured(message: Message, source: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request that holds the whole event in its body."""
    attributes = json.dumps(_attributes(message, source))[:-1].encode()
    if _is_json(message.content_type) and _is_strict(message.body):
        data = b',"data":' + message.body  # as it is: whatever was signed or hashed stays what it was
    else:
        data = b',"data_base64":"' + b64encode(message.body) + b'"'
    # In lower case, though names of charsets have none: the package `cloudevents` of npm compares it as it stands.
    return {"content-type": f"{STRUCTURED}; charset=utf-8"}, attributes + data + b"}"


def binary(message: Message, source: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request whose body is the message's own.

    Not if that is an event itself: every receiver would take it for the one that is sent.
    """
    headers = {"content-type": message.content_type}
    if is_structured(headers):
        return structured(message, source)
    attributes = _attributes(message, source)
    del attributes["datacontenttype"]
    headers.update((f"ce-{name}", quote(value, safe=_UNENCODED)) for name, value in attributes.items())
    return headers, message.body


def _attributes(message: Message, source: str) -> dict[str, str]:
    attributes = {
        "specversion": _VERSION,
        "id": message.id,
        "source": source,
        "type": message.routing_key,
        "time": _written(message.created_at),
        "datacontenttype": message.content_type,
    }
    if message.key is not None:
        attributes["subject"] = message.key
    if len(message.tracking_ids) > 1:
        attributes[TRACKING_IDS] = ",".join(quote(id, safe="") for id in message.tracking_ids)
    if message.expires_at is not None:
        attributes[EXPIRES] = _written(message.expires_at)
    if message.due_at is not None:
        attributes[DUE] = _written(message.due_at)
    if message.headers:
        _add_headers(attributes, message.headers)
    return attributes


def _add_headers(attributes: dict[str, str], headers: Mapping[str, str]) -> None:
    others = {}
    for name, value in headers.items():
        if name in (SOURCE, DATASCHEMA) and value:
            attributes[name.removeprefix("ce-")] = value
        elif _EXTENSION.fullmatch(name) and name not in _CORE | _OURS and value and not _CONTROL.search(value):
            attributes[name] = value
        else:
            others[name] = value
    if others:
        attributes[HEADERS] = json.dumps(others)


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


@lru_cache(maxsize=256)
def _is_json(content_type: str) -> bool:
    kind = _media_type(content_type)
    return kind.endswith(("/json", "+json"))


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_strict(body: bytes) -> bool:
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError:
        return False
    return True


# In.


def is_cloud_event(headers: Mapping[str, str]) -> bool:
    """Whether a request says that it holds one or more; names of headers in lower case."""
    return is_structured(headers) or "ce-specversion" in headers


def is_structured(headers: Mapping[str, str]) -> bool:
    """Whether the whole event, or several, are in the body."""
    return _media_type(headers.get("content-type", "")).startswith("application/cloudevents")


def binary_id(headers: Mapping[str, str]) -> str:
    """The id of an event in binary mode; raises CloudEventInvalid."""
    return _unescaped("ce-id", headers.get("ce-id", ""))


def parse(headers: Mapping[str, str], body: bytes) -> list[ReceivedEvent]:
    """The events of a request in any of the three modes; names of headers in lower case. Raises CloudEventInvalid.

    A body of JSON is kept byte for byte. Limits are not checked here: they are when the message is stored.
    """
    kind = _media_type(headers.get("content-type", ""))
    if kind.startswith("application/cloudevents"):
        if kind not in (STRUCTURED, BATCHED):
            raise CloudEventUnsupported(f"events as {named(kind)} are not understood here: send {STRUCTURED}")
        reader = EventReader(_decoded(headers["content-type"], body))
        return [_from_json(event) for event in (reader.batch() if kind == BATCHED else [reader.single()])]
    if "ce-specversion" in headers:
        return [_from_headers(headers, body)]
    raise CloudEventInvalid(
        f"no CloudEvent: send {STRUCTURED}, or the header ce-specversion and the others of an event"
    )


def _decoded(content_type: str, body: bytes) -> str:
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", content_type, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise CloudEventUnsupported(f"the charset {named(charset[1])} is not understood here: send UTF-8")
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise CloudEventInvalid("the body is not UTF-8") from None


def _from_json(event: JsonEvent) -> ReceivedEvent:
    members = dict(event.members)
    encoded = members.pop("data_base64", None)
    members.pop("data", None)
    attributes = {name: _text(name, value) for name, value in members.items() if value is not None}
    content_type = attributes.get("datacontenttype")
    if encoded is not None:
        if event.data is not None:
            raise CloudEventInvalid("data and data_base64 exclude each other: send one of them")
        return _received(attributes, content_type or BYTES, _from_base64(encoded))
    if event.data is None:
        return _received(attributes, content_type or BYTES, b"")
    data = event.members["data"]
    if content_type is not None and not _is_json(content_type) and isinstance(data, str):
        return _received(attributes, content_type, _utf8(data))
    return _received(attributes, content_type or JSON, event.data.encode())


def _from_headers(headers: Mapping[str, str], body: bytes) -> ReceivedEvent:
    attributes = {
        name.removeprefix("ce-"): _unescaped(name, value) for name, value in headers.items() if name.startswith("ce-")
    }
    if "datacontenttype" in attributes or "data" in attributes:
        raise CloudEventInvalid("in binary mode the body is the data and content-type its type: leave out ce-data…")
    return _received(attributes, headers.get("content-type") or BYTES, body)


def _received(attributes: Mapping[str, str], content_type: str, body: bytes) -> ReceivedEvent:
    _check(attributes)
    if not is_media_type(content_type):
        raise CloudEventInvalid(f"the content type {named(content_type)} is no media type: write type/subtype")
    id, source = attributes["id"], attributes["source"]
    message = Message(
        routing_key=attributes["type"],
        body=body,
        content_type=content_type,
        headers=_headers(attributes),
        key=attributes.get("subject"),
        tracking_ids=_tracking_ids(attributes.get(TRACKING_IDS), id),
        created_at=_moment(attributes, "time") or datetime.now(UTC),
        expires_at=_moment(attributes, EXPIRES),
        due_at=_moment(attributes, DUE),
    )
    return ReceivedEvent(message, source)


def _check(attributes: Mapping[str, str]) -> None:
    missing = [name for name in _REQUIRED if not attributes.get(name)]
    if missing:
        raise CloudEventInvalid(f"{', '.join(missing)} must be there and not be empty: every CloudEvent has them")
    if attributes["specversion"] != _VERSION:
        raise CloudEventInvalid(f"specversion {named(attributes['specversion'])}: only {_VERSION} is understood here")
    empty = [name for name in _OPTIONAL if attributes.get(name) == ""]
    if empty:
        raise CloudEventInvalid(f"{', '.join(empty)} must not be empty: leave out what is not known")
    for name in attributes:
        if not _NAME.fullmatch(name):
            raise CloudEventInvalid(f"the attribute {named(name)}: names consist of a-z and 0-9")


def _headers(attributes: Mapping[str, str]) -> dict[str, str]:
    headers = {name: value for name, value in attributes.items() if name not in _CORE and name not in _OURS}
    headers[SOURCE] = attributes["source"]
    if "dataschema" in attributes:
        headers[DATASCHEMA] = attributes["dataschema"]
    if HEADERS in attributes:
        headers |= _other_headers(attributes[HEADERS])
    return headers


def _other_headers(text: str) -> dict[str, str]:
    try:
        others = json.loads(text)
    except (ValueError, RecursionError):
        others = None
    if not isinstance(others, dict) or not all(isinstance(value, str) for value in others.values()):
        raise CloudEventInvalid(f"{HEADERS} is a JSON object whose values are texts")
    return {name: value for name, value in others.items() if name != SOURCE}


def _tracking_ids(text: str | None, id: str) -> tuple[str, ...]:
    ids = tuple(unquote(each) for each in text.split(",")) if text else ()
    return kept(ids if ids and ids[-1] == id else (*ids, id))


def _moment(attributes: Mapping[str, str], name: str) -> datetime | None:
    text = attributes.get(name)
    if not text:
        return None
    try:
        if not _TIME.fullmatch(text):
            raise ValueError
        moment = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise CloudEventInvalid(f"{name} {named(text)}: write times as 2026-01-31T12:00:00Z") from None
    if not OLDEST <= moment < LATEST:
        raise CloudEventInvalid(f"{name} {named(text)}: its year must be between {OLDEST.year} and {LATEST.year - 1}")
    return moment


def _text(name: str, value: object) -> str:
    match value:
        case str():
            _utf8(value)
            return value
        case _ if name in _CORE:
            raise CloudEventInvalid(f"{name} is a {type(value).__name__}: a text is needed")
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
    raise CloudEventInvalid(f"the attribute {named(name)} is a {type(value).__name__}: a text, a number, true or false")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CloudEventInvalid("half of a surrogate pair is no character") from None


def _from_base64(encoded: object) -> bytes:
    try:
        if not isinstance(encoded, str):
            raise ValueError
        return b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise CloudEventInvalid("data_base64 is no base64") from None


def _unescaped(name: str, value: str) -> str:
    """A header's value: out of its quotes, then decoded once."""
    quoted = _QUOTED.fullmatch(value)
    if quoted:
        value = _ESCAPED.sub(r"\1", quoted[1])
    if "%" not in value:
        return value
    if _HALF_ENCODED.search(value):
        raise CloudEventInvalid(f"the header {named(name)}: % is followed by two hexadecimal digits, and is itself %25")
    try:
        return unquote_to_bytes(value).decode()
    except UnicodeDecodeError:
        raise CloudEventInvalid(f"the header {named(name)}: what is percent-encoded is not UTF-8") from None
