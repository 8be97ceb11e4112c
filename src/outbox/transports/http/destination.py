"""HttpDestination: where requests go, without anything that must not be shown."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from typing import Self
from urllib.parse import unquote

from yarl import URL

from outbox.core.binding import LONGEST_KEY
from outbox.core.errors import ConfigurationError
from outbox.transports.http.ssrf import check_url

LIKE_A_TOKEN = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z]).{12,}", re.DOTALL)  # part of a path that is no word


@dataclass(frozen=True, slots=True)
class HttpDestination:
    """A destination's URL. What may be secret in it is not shown, and user and password travel in a header."""

    url: URL = field(repr=False)
    authorization: str | None = field(repr=False)
    password: str = field(repr=False)

    @classmethod
    def of(cls, text: str, *, plain_http: bool, untrusted: bool) -> Self:
        """An error does not repeat the URL: it may hold a password or a token."""
        url = check_url(text) if untrusted else _parsed(text)
        if url.scheme == "http" and not plain_http and not _is_loopback(url.host or ""):
            raise ConfigurationError(
                f"http://{url.host} would send messages readable for everyone on the way: use https://, or "
                "HttpTransport(…, plain_http=True) if the way is a private one"
            )
        return cls(url.with_user(None).with_fragment(None), _authorization(url), url.password or "")

    @property
    def host(self) -> str:
        """Host and port, for errors."""
        return f"{self.url.host}:{self.url.port}"

    @property
    def name(self) -> str:
        """The URL without what may be secret in it, short enough for a column."""
        parts = self.url.raw_path.split("/")
        shown = f"{self.url.origin()}{'/'.join(map(_without_token, parts))}"
        return shown.encode()[:LONGEST_KEY].decode(errors="ignore")


def _parsed(text: str) -> URL:
    try:
        url = URL(text)
        host, port = url.host, url.port
    except (TypeError, ValueError, IndexError):  # yarl raises the last for some brackets
        url, host, port = URL(""), None, None
    if url.scheme not in ("http", "https") or not host or not port:
        raise ConfigurationError("no URL of a destination: write for example https://example.com/events")
    return url


def _without_token(part: str) -> str:
    """A part of a path. In place of a token stands what tells it from others: names stay different, and the same."""
    if not LIKE_A_TOKEN.fullmatch(unquote(part)):
        return part
    return f"***{sha256(part.encode()).hexdigest()[:8]}"


def _authorization(url: URL) -> str | None:
    if url.user is None and url.password is None:
        return None
    pair = f"{url.user or ''}:{url.password or ''}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
