"""Response: what a sender is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Response:
    """A status, and a line for the people who look why."""

    status: int
    line: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, send: Send) -> None:
        body = f"{self.line}\n".encode(errors="replace") if self.line else b""
        headers = {
            "content-type": "text/plain; charset=utf-8",
            "content-length": str(len(body)),
            "x-content-type-options": "nosniff",  # the line may repeat what a stranger wrote
            **self.headers,
        }
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": named})
        await send({"type": "http.response.body", "body": body})


ACCEPTED = Response(202)


class Declined(Exception):
    """Nothing may be taken for stored; the response says why, and whether it is worth trying again."""

    def __init__(self, status: int, line: str, **headers: str) -> None:
        super().__init__(line)
        self.response = Response(status, line, {name.replace("_", "-"): value for name, value in headers.items()})


def not_now(line: str, seconds: int) -> Declined:
    """It is not the sender's fault: the same request may well be taken later."""
    return Declined(503, line, retry_after=str(seconds))
