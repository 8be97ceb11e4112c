"""Request: what a sender sent, read within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outbox.inbound.http.answer import Declined, Receive, Scope

_READ_ONCE = ("content-", "ce-", "webhook-")  # two different ones would leave open which of them counts


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request."""

    endpoint: str  # its path
    path: str  # what of that lies below the place where the application is mounted, without slashes around it
    headers: Mapping[str, str]  # names in lower case
    body: bytes


async def read(scope: Scope, receive: Receive, *, largest: int, within: float) -> Request:
    """Take in a request, no more of it than `largest` bytes and for no longer than `within` seconds."""
    if scope["method"] != "POST":
        raise Declined(405, "events and webhooks are sent with POST", allow="POST")
    headers = _headers(scope["headers"])
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Declined(415, "compressed bodies are not taken: leave out content-encoding", accept_encoding="identity")
    _check_length(headers.get("content-length", "0"), largest)
    try:
        async with asyncio.timeout(within):
            body = await _body(receive, largest)
    except TimeoutError:
        raise _too_slow(scope, within) from None
    endpoint, path = _paths(scope)
    return Request(endpoint, path, headers, body)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, value in pairs:
        name = raw_name.decode("latin-1").lower()
        if name in headers and name.startswith(_READ_ONCE):
            raise Declined(400, f"the header {name!r} is there twice")
        headers[name] = value.decode("latin-1")
    return headers


def _check_length(length: str, largest: int) -> None:
    """Before anything is read. What is read is counted nevertheless."""
    if not (length.isascii() and length.isdigit()):
        raise Declined(400, "content-length is no number")
    if len(length) > 18 or int(length) > largest:
        raise _too_large(largest)


async def _body(receive: Receive, largest: int) -> bytes:
    parts, size = [], 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            # Nobody hears it. But a middleware that saw no answer would take that for a fault.
            raise Declined(400, "the connection ended before the request did")
        part = event.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > largest:
            raise _too_large(largest)
        if not event.get("more_body", False):
            return b"".join(parts)


def _paths(scope: Scope) -> tuple[str, str]:
    """The path, and what of it lies below the mount.

    Servers, proxies and frameworks do not agree how much of the mount's path a request's begins with. And however many
    slashes somebody writes, it is the same endpoint: otherwise one more would make a copy new.
    """
    root, path = ([word for word in scope.get(name, "").split("/") if word] for name in ("root_path", "path"))
    stripped = next(count for count in range(len(root) + 1) if path[: len(root) - count] == root[count:])
    below = path[len(root) - stripped :]
    return "/" + "/".join([*root, *below]), "/".join(below)


def _too_large(largest: int) -> Declined:
    return Declined(413, f"a request has at most {largest} bytes here: send fewer events at once, or smaller ones")


def _too_slow(scope: Scope, within: float) -> Declined:
    line = f"the request did not arrive within {within:g} s"
    if scope.get("http_version", "1.1").startswith("1"):  # later versions have no such header
        return Declined(408, line, connection="close")
    return Declined(408, line)
