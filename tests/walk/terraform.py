"""Terraform, read: resources as `outbox topology` writes them, with each `for_each` spelled out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_][\w.-]*|-?\d+|[{}()\[\]=,])')
_SIGNS = frozenset("{}()[]=,")


@dataclass(frozen=True)
class Reference:
    """A name that stands for something else."""

    name: str


@dataclass
class Resource:
    """One resource after `for_each`: its attributes, with those of its blocks under the block's name."""

    kind: str
    label: str
    values: dict[str, Any]
    depends_on: list[str] = field(default_factory=list)


def resources(text: str) -> list[Resource]:
    """Every resource that the text makes."""
    return [each for block in _Reader(text).blocks() for each in _expanded(block)]


def _expanded(resource: Resource) -> Iterator[Resource]:
    after = [reference.name for reference in resource.values.pop("depends_on", [])]
    instances = resource.values.pop("for_each", {None: None})
    for key, value in instances.items():
        yield Resource(resource.kind, resource.label, _resolved(resource.values, key, value), after)


def _resolved(value: Any, key: Any, each: Any) -> Any:
    match value:
        case dict():
            return {name: _resolved(inner, key, each) for name, inner in value.items()}
        case Reference("each.key"):
            return key
        case Reference("each.value"):
            return each
        case Reference(name) if name.startswith("each.value."):
            return each[name.removeprefix("each.value.")]
        case _:
            return value


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        position = 0
        while position < len(text.rstrip()):
            found = _TOKEN.match(text, position)
            assert found is not None, f"not understood: {text[position : position + 40]!r}"
            self._tokens.append(found[1])
            position = found.end()

    def blocks(self) -> Iterator[Resource]:
        while self._tokens:
            self._expect("resource")
            kind, label = self._expression(), self._expression()
            yield Resource(kind, label, self._body())

    def _body(self) -> dict[str, Any]:
        self._expect("{")
        values: dict[str, Any] = {}
        while not self._next_is("}"):
            name = self._key()
            if self._tokens[0] == "{":
                values[name] = self._body()
            else:
                self._expect("=")
                values[name] = self._expression()
            self._next_is(",")
        return values

    def _key(self) -> str:
        found = self._expression()
        return found.name if isinstance(found, Reference) else found

    def _expression(self) -> Any:
        token = self._tokens[0]
        if token == "{":
            return self._body()
        self._tokens.pop(0)
        if token == "[":
            found = []
            while not self._next_is("]"):
                found.append(self._expression())
                self._next_is(",")
            return found
        if token == "jsonencode":
            self._expect("(")
            value = self._expression()
            self._expect(")")
            return json.dumps(value)
        assert token not in _SIGNS, token
        if token[0] == '"':
            assert not re.search(r"(?<![$%])(\$\$)*(\$\{|%\{)", token), f"a template: {token}"
            return json.loads(token.replace("$${", "${").replace("%%{", "%{"))
        if token in ("true", "false") or token.lstrip("-").isdigit():
            return json.loads(token)
        return Reference(token)

    def _expect(self, token: str) -> None:
        assert self._tokens.pop(0) == token

    def _next_is(self, token: str) -> bool:
        if self._tokens[0] != token:
            return False
        self._tokens.pop(0)
        return True
