"""Documents: values as JSON. Fields are called as the Python attributes are; durations are seconds, times ISO 8601."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from outbox.cli import words
from outbox.core.message import Message


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
        case _ if is_dataclass(value):
            names = [field.name for field in fields(value)]
            return {name: document(getattr(value, name), with_body=with_body) for name in names}
        case _:
            return value


def print_document(value: object, *, with_body: bool = False, compact: bool = False) -> None:
    """Print one document, in ASCII: escapes of JSON are also what keeps a terminal safe."""
    print(json.dumps(document(value, with_body=with_body), indent=None if compact else 2), flush=compact)


def _message(message: Message, with_body: bool) -> dict[str, Any]:
    names = [field.name for field in fields(message) if field.name != "body"]
    found = {"id": message.id} | {name: document(getattr(message, name)) for name in names}
    found["body_size"] = len(message.body)
    if with_body:
        found["body"], found["body_encoding"] = words.body(message.body)
    return found
