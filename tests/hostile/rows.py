"""Rows that another program wrote: each kind is one that emit would not have written, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNDECODABLE, EXPIRED, REFUSED = "undecodable", "expired", "refused"  # dead letters, by their reason
SENT = "sent"  # sent or handled, like any other
WAITS = "waits"  # it is not due yet, and never will be

SETUPS = ("worker", "function", "http", "http-binary", "rabbitmq", "sqlite")

DEEP = 20_000
LONG = "é" * 255  # fits into its column, and has 510 bytes
HIGHEST = 2**31 - 1


def ordinary_row(message_id: str, routing_key: str, body: object) -> dict[str, Any]:
    """A row of the outbox table, as SQL of another program would write it."""
    return {
        "message_id": message_id,
        "routing_key": routing_key,
        "content_type": "application/json",
        "body": json.dumps(body).encode(),
        "created_at": "2026-01-01 00:00:00.000000",
        "due_at": "2026-01-01 00:00:00.000000",
        "attempts": 0,
        "starts": 0,
        "destination": "",
        "unroutable": False,
    }


@dataclass(frozen=True)
class Kind:
    """A row: the columns in which it differs from an ordinary one, and its fate."""

    columns: Mapping[str, Any]
    fate: str = UNDECODABLE
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # by set-up, where its fate is another one

    def fate_in(self, setup: str) -> str:
        return self.elsewhere.get(setup, self.fate)


# Routing a message sets its counts to zero, so a queue of the database sees those only where a row names its queue.
_ROUTED = {"worker": SENT, "sqlite": SENT}
COUNTS = {
    "starts at their end": Kind({"starts": HIGHEST}, UNDECODABLE, _ROUTED),
    "starts before their end": Kind({"starts": HIGHEST - 1}, UNDECODABLE, _ROUTED),
    "attempts at their end": Kind({"attempts": HIGHEST}, UNDECODABLE, _ROUTED),
    "attempts and starts at their end": Kind({"attempts": HIGHEST, "starts": HIGHEST}, UNDECODABLE, _ROUTED),
    "more attempts than there can be": Kind({"attempts": 10**9, "starts": 10**9}, UNDECODABLE, _ROUTED),
    "negative starts": Kind({"starts": -HIGHEST - 1}, UNDECODABLE, _ROUTED),
    "negative attempts": Kind({"attempts": -HIGHEST - 1, "starts": HIGHEST}, UNDECODABLE, _ROUTED),
}

_AMQP_REFUSES = {"rabbitmq": REFUSED}
HEADERS = {
    "headers: a list": Kind({"headers": '["a"]'}),
    "headers: a number": Kind({"headers": "5"}),
    "headers: a text": Kind({"headers": '"x"'}),
    "headers: null": Kind({"headers": "null"}),
    "headers: no JSON": Kind({"headers": "x"}),
    "headers: cut off": Kind({"headers": '{"a": "b'}),
    "headers: a number as value": Kind({"headers": '{"a": 5}'}),
    "headers: half a character": Kind({"headers": r'{"a": "\ud800"}'}),
    "headers: half a character in a name": Kind({"headers": r'{"\ud800": "a"}'}),
    "headers: a list as value": Kind({"headers": '{"a": ["b"]}'}),
    "headers: nested lists": Kind({"headers": "[" * DEEP + "]" * DEEP}),
    "headers: nested objects": Kind({"headers": '{"a":' * DEEP + "1" + "}" * DEEP}),
    "headers: large": Kind({"headers": '{"a": "' + "x" * 200_000 + '"}'}),
    "headers: a broker's own": Kind({"headers": '{"CC": "elsewhere"}'}, SENT, _AMQP_REFUSES),
    "headers: a line break": Kind({"headers": r'{"a": "b\r\nc: d"}'}, SENT),
}

TRACKING_IDS = {
    "tracking ids: a number": Kind({"tracking_ids": "5"}),
    "tracking ids: a text": Kind({"tracking_ids": '"abc"'}),
    "tracking ids: an object": Kind({"tracking_ids": '{"a": 1}'}),
    "tracking ids: numbers": Kind({"tracking_ids": "[1]"}),
    "tracking ids: no JSON": Kind({"tracking_ids": "x"}),
    "tracking ids: half a character": Kind({"tracking_ids": r'["\ud800"]'}),
    "tracking ids: a line break": Kind({"tracking_ids": r'["a\nb"]'}, SENT),
    "tracking ids: a megabyte": Kind({"tracking_ids": '["' + "x" * 1_000_000 + '"]'}),
    "tracking ids: nested lists": Kind({"tracking_ids": "[" * DEEP + "]" * DEEP}),
}

# SQLite keeps times as text, and of what is no time it knows neither before nor after.
TIMES = {
    "created_at: year 20000": Kind({"created_at": "20000-01-01 00:00:00Z"}),
    "created_at: 4000 BC": Kind({"created_at": "4000-01-01 00:00:00Z BC"}),
    "created_at: infinity": Kind({"created_at": "infinity"}),
    "created_at: -infinity": Kind({"created_at": "-infinity"}),
    "created_at: the last second of 9999": Kind({"created_at": "9999-12-31 23:59:59Z"}),
    "created_at: the first second of 1": Kind({"created_at": "0001-01-01 00:00:00Z"}),
    "expires_at: year 20000": Kind({"expires_at": "20000-01-01 00:00:00Z"}, SENT, {"sqlite": EXPIRED}),
    "expires_at: the last second of 9999": Kind({"expires_at": "9999-12-31 23:59:59Z"}, SENT),
    "expires_at: 4000 BC": Kind({"expires_at": "4000-01-01 00:00:00Z BC"}, EXPIRED, {"sqlite": SENT}),
    "expires_at: infinity": Kind({"expires_at": "infinity"}, SENT),
    "expires_at: -infinity": Kind({"expires_at": "-infinity"}, EXPIRED),
    "due_at: 4000 BC": Kind({"due_at": "4000-01-01 00:00:00Z BC"}, SENT, {"sqlite": WAITS}),
    "due_at: -infinity": Kind({"due_at": "-infinity"}, SENT),
    "due_at: infinity": Kind({"due_at": "infinity"}, WAITS),
    "first_due_at: year 20000": Kind({"first_due_at": "20000-01-01 00:00:00Z"}, SENT),
    "first_due_at: -infinity": Kind({"first_due_at": "-infinity"}, SENT),
    "routed_at: infinity": Kind({"routed_at": "infinity"}, SENT),
}

_BINARY_REFUSES = {"http-binary": REFUSED}  # there it is a header of its request
TEXTS = {
    "routing key: 510 bytes": Kind({"routing_key": LONG}),
    "routing key: empty": Kind({"routing_key": ""}, SENT),
    "routing key: a line break": Kind({"routing_key": "bad\nrow"}, SENT),
    "message id: 510 bytes": Kind({"message_id": LONG}),
    "message id: empty": Kind({"message_id": ""}, SENT),
    "key: 510 bytes": Kind({"key": LONG}, SENT, {"rabbitmq": UNDECODABLE}),  # by its worker
    "content type: 510 bytes": Kind({"content_type": LONG}, SENT, _AMQP_REFUSES | _BINARY_REFUSES),
    "content type: é": Kind({"content_type": "text/kräftig"}, SENT, _BINARY_REFUSES),
    "content type: a line break": Kind({"content_type": "text/plain\r\nx: y"}, SENT, _BINARY_REFUSES),
    "content type: empty": Kind({"content_type": ""}, SENT),
    "history: long": Kind({"history": "x" * 100_000}, SENT),
}

GROUPS: Mapping[str, Mapping[str, Kind]] = {
    "counts": COUNTS,
    "headers": HEADERS,
    "tracking ids": TRACKING_IDS,
    "times": TIMES,
    "texts": TEXTS,
}
KINDS = {name: kind for group in GROUPS.values() for name, kind in group.items()}

# What only SQLite keeps, whose columns have no types.
UNTYPED = {
    "body: a text": Kind({"body": "text"}),
    "body: a number": Kind({"body": 2**40}),
    "routing key: bytes": Kind({"routing_key": b"bad"}),
    "message id: bytes": Kind({"message_id": b"bad"}),
    "destination: bytes": Kind({"destination": b"same"}, WAITS),
    "timer id: bytes": Kind({"timer_id": b"bad"}, SENT),
    "history: bytes": Kind({"history": b"bad"}, SENT),
    "lease token: any text": Kind({"lease_token": "mine", "lease_until": "2026-01-01 00:00:00"}, SENT),
    "attempts: a text": Kind({"attempts": "many"}, SENT),
    "created_at: a number": Kind({"created_at": 5}),
    "created_at: any text": Kind({"created_at": "yesterday"}),
    "due_at: a number": Kind({"due_at": 5}, SENT),
    "due_at: no day": Kind({"due_at": "2020-99-99 00:00:00"}, SENT),
    "due_at: any text": Kind({"due_at": "tomorrow"}, WAITS),
}


@dataclass(frozen=True)
class NotUtf8:
    """A text for SQLite, which keeps the bytes that it is given."""

    bytes: bytes


_INVALID = NotUtf8(b"bad.\xff\xfe")
NOT_UTF_8 = {
    "routing key: not UTF-8": Kind({"routing_key": _INVALID}),
    "message id: not UTF-8": Kind({"message_id": _INVALID}),
    "key: not UTF-8": Kind({"key": _INVALID}),
    "content type: not UTF-8": Kind({"content_type": _INVALID}),
    "headers: not UTF-8": Kind({"headers": NotUtf8(b'{"a": "\xff"}')}),
    "tracking ids: not UTF-8": Kind({"tracking_ids": NotUtf8(b'["\xff"]')}),
    "created_at: not UTF-8": Kind({"created_at": _INVALID}),
    "timer id: not UTF-8": Kind({"timer_id": _INVALID}, SENT),
    "history: not UTF-8": Kind({"history": _INVALID}, SENT),
}
