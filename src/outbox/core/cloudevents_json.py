"""Events in JSON: the members of each, and its data as it was written, which no decoder tells."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outbox.core.errors import CloudEventInvalid, TooManyEvents, named

MOST_EVENTS: Final = 1000  # in one request: they are read, and stored, without a pause

_SPACE = re.compile(r"[ \t\n\r]*")
_MEMBER = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')  # the name, if it is as plain as most are
_AFTER = re.compile(r"[ \t\n\r]*([,}])")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class JsonEvent:
    """One event, and its data in the very characters it came in."""

    members: Mapping[str, Any]
    data: str | None  # as it was written


class EventReader:
    """Reads the outermost level by itself, because no decoder tells how the data was written."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._began = 0  # where the last value did

    def single(self) -> JsonEvent:
        event = self._event()
        self._end()
        return event

    def batch(self) -> list[JsonEvent]:
        events = []
        self._expect("[")
        if not self._found("]"):
            events.append(self._event())
            while self._found(","):
                if len(events) == MOST_EVENTS:
                    raise TooManyEvents(f"a request has at most {MOST_EVENTS} events here: send the others in another")
                events.append(self._event())
            self._expect("]")
        self._end()
        return events

    def _event(self) -> JsonEvent:
        members: dict[str, Any] = {}
        data = None
        self._expect("{")
        more = not self._found("}")
        while more:
            name = self._name()
            value = self._value()
            if not isinstance(name, str) or name in members:
                raise CloudEventInvalid(f"{named(name)} is there twice, or is no name: each member has one of its own")
            members[name] = value
            if name == "data":
                data = self._text[self._began : self._at]
            more = self._goes_on()
        return JsonEvent(members, data)

    def _name(self) -> Any:
        """And what stands between it and its value."""
        member = _MEMBER.match(self._text, self._at)
        if member:
            self._at = member.end()
            return member[1]
        self._skip()
        name = self._value()
        self._expect(":")
        self._skip()
        return name

    def _value(self) -> Any:
        self._began = self._at
        try:
            value, self._at = _DECODER.raw_decode(self._text, self._at)
        except (ValueError, RecursionError) as error:
            what = type(error).__name__
            raise CloudEventInvalid(f"the body is no JSON: {what} after character {self._began}") from None
        return value

    def _goes_on(self) -> bool:
        """Whether another member follows."""
        after = _AFTER.match(self._text, self._at)
        if after is None:
            raise CloudEventInvalid(f"the body is no JSON of CloudEvents: }} is missing at {self._at}")
        self._at = after.end()
        return after[1] == ","

    def _found(self, character: str) -> bool:
        self._skip()
        found = self._text.startswith(character, self._at)
        self._at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._found(character):
            raise CloudEventInvalid(f"the body is no JSON of CloudEvents: {character} is missing at {self._at}")

    def _end(self) -> None:
        self._skip()
        if self._at < len(self._text):
            raise CloudEventInvalid(f"the body goes on after the event, at {self._at}")

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
