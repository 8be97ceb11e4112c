"""Documents: values as JSON. Fields are called as the Python attributes are; durations are seconds, times ISO 8601.

Ids are strings: those of dead letters at a broker have more digits than programs with floating point numbers keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from outbox.cli import words
from outbox.core.dead_letter import DeadLetter
from outbox.core.message import Message
from outbox.core.store import StoredMessage

_ENTRY = re.compile(
    r"(?P<at>[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}Z) "
    r"(?:attempt (?P<attempt>[0-9]{1,9}) )?(?P<what>[^:]*): ?(?P<error>.*)"
)


def document(value: object, *, with_body: bool = False) -> Any:
    """A value as JSON knows it. Bodies are left out unless they are asked for."""
    match value:
        case Message():
            return _message(value, with_body)
        case timedelta():
            return value.total_seconds()
        case datetime():
            return value.isoformat()
        case Enum():
            return value.value
        case Mapping():
            return {str(name): document(each, with_body=with_body) for name, each in value.items()}
        case list() | tuple():
            return [document(each, with_body=with_body) for each in value]
        case DeadLetter() | StoredMessage():
            return _stored(value, with_body)
        case _ if is_dataclass(value):
            names = [field.name for field in fields(value)]
            return {name: document(getattr(value, name), with_body=with_body) for name in names}
        case _:
            return value


def print_document(value: object, *, with_body: bool = False, compact: bool = False) -> None:
    """Print one document, in ASCII: escapes of JSON are also what keeps a terminal safe."""
    print(json.dumps(document(value, with_body=with_body), indent=None if compact else 2), flush=compact)


def _stored(value: DeadLetter | StoredMessage, with_body: bool) -> dict[str, Any]:
    found = {field.name: document(getattr(value, field.name), with_body=with_body) for field in fields(value)}
    found |= {name: str(found[name]) for name in ("id", "row_id") if name in found}
    found["history"] = [_entry(line) for line in value.history.split("\n") if line]
    return found


def _entry(line: str) -> dict[str, Any]:
    """A line of a history. What another program wrote there, or what was cut because it grew too long, is all error."""
    found = _ENTRY.fullmatch(line)
    with suppress(ValueError):
        if found is not None:
            at, attempt = datetime.fromisoformat(found["at"]), found["attempt"]
            what = {"attempt": int(attempt) if attempt else None, "what": found["what"], "error": found["error"]}
            return {"at": at.isoformat(), **what}
    return {"at": None, "attempt": None, "what": None, "error": line}


def _message(message: Message, with_body: bool) -> dict[str, Any]:
    names = [field.name for field in fields(message) if field.name != "body"]
    found = {"id": message.id} | {name: document(getattr(message, name)) for name in names}
    found["body_size"] = len(message.body)
    if with_body:
        found["body"], found["body_encoding"] = words.body(message.body)
    return found
