"""Request: what a sender sent, and what its head says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from outbox.core.cloudevents import is_cloud_event, is_structured
from outbox.inbound.http.response import Declined, Scope

Mode = Literal["structured", "binary", "webhook"]  # a CloudEvent in its body, one in headers, none

MODES: Final[tuple[Mode, ...]] = ("structured", "binary", "webhook")

_READ_ONCE = ("content-", "ce-", "webhook-")  # two different ones would leave open which of them counts


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What comes before a request's body, and says what that is."""

    endpoint: str  # its path
    path: str  # what of that lies below the place where the application is mounted, without slashes around it
    headers: Mapping[str, str]  # names in lower case

    @property
    def mode(self) -> Mode:
        """How the body is to be read."""
        if is_structured(self.headers):
            return "structured"
        return "binary" if is_cloud_event(self.headers) else "webhook"


@dataclass(frozen=True, slots=True)
class Request(RequestHead):
    """A whole request."""

    body: bytes


def head_of(scope: Scope, largest: int) -> RequestHead:
    """What is known of a request before its body is read; one that says it is larger than this is declined."""
    if scope["method"] != "POST":
        raise Declined(405, "events and webhooks are sent with POST", allow="POST")
    headers = _headers(scope["headers"])
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Declined(415, "compressed bodies are not taken: leave out content-encoding", accept_encoding="identity")
    _check_length(headers.get("content-length", "0"), largest)
    return RequestHead(*_paths(scope), headers)


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
        raise too_large(largest)


def _paths(scope: Scope) -> tuple[str, str]:
    """The path, and the part of it below the mount.

    Servers, proxies and frameworks do not agree how much of the mount's path a request's begins with. And however many
    slashes a sender writes, it is the same endpoint: otherwise one more would make a copy new.
    """
    root, path = ([word for word in scope.get(name, "").split("/") if word] for name in ("root_path", "path"))
    stripped = next(count for count in range(len(root) + 1) if path[: len(root) - count] == root[count:])
    below = path[len(root) - stripped :]
    return "/" + "/".join([*root, *below]), "/".join(below)


def too_large(largest: int) -> Declined:
    return Declined(413, f"a request has at most {largest} bytes here: send fewer events at once, or smaller ones")
