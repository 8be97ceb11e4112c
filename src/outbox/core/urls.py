"""URLs: which texts are references at all, and where a password that was not quoted would be shown."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

from outbox.core.errors import ConfigurationError

_END_OF_AUTHORITY = re.compile(r"[/?#]")
_HALF_ENCODED = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DELIMITERS = "!$&'()*+,;="
_PLAIN = rf"[A-Za-z0-9\-._~{_DELIMITERS}]|%[0-9A-Fa-f]{{2}}"
_URI_REFERENCE = re.compile(  # RFC 3986
    rf"""
    (?: [A-Za-z][A-Za-z0-9+\-.]*: | (?![^/?\#]*:) )  # a scheme, or no colon where one would end
    (?: // (?: (?:{_PLAIN}|:)*@ )? (?: \[[0-9A-Za-z:.]+\] | (?:{_PLAIN})* ) (?: :[0-9]* )? (?=[/?\#]|\Z) | (?!//) )
    (?: {_PLAIN}|[:@/] )*
    (?: \?(?:{_PLAIN}|[:@/?])* )?
    (?: \#(?:{_PLAIN}|[:@/?])* )?
    """,
    re.VERBOSE,
)


def check_uri_reference(text: str, what: str, error: type[Exception]) -> None:
    """Refuse what is neither a URI nor part of one, and say how to write it."""
    if not _URI_REFERENCE.fullmatch(text):
        raise error(f"{what} {text!r} is no URI-reference (RFC 3986): write {_as_reference(text)!r}, or another one")


def _as_reference(text: str) -> str:
    """The same with the characters encoded that a reference cannot have."""
    whole = _HALF_ENCODED.sub("%25", text)
    encoded = quote(whole, safe=f"{_DELIMITERS}%:@/?#")
    return encoded if _URI_REFERENCE.fullmatch(encoded) else quote(text, safe="/")


def check_credentials(url: str, what: str) -> None:
    """Refuse a URL with an `@` behind its host: a `/`, `?` or `#` in a password ends it too early.

    What follows would be taken for a path, which is shown, and what stands before it, behind another `@`, for a host.
    """
    rest = url.partition("://")[2]
    authority = _END_OF_AUTHORITY.split(rest, 1)[0]
    if "@" in rest[len(authority) :]:
        raise ConfigurationError(
            f"{what} has an @ after its host: in a password write / as %2F, ? as %3F and # as %23, "
            "and elsewhere @ as %40"
        )
    try:
        urlsplit(url).port  # noqa: B018 - a word in its place may be a password whose host was forgotten
    except ValueError:  # its text repeats the URL, or a part of it
        raise ConfigurationError(
            f"{what} cannot be read: name a host, and a port that is a number; in user and password write as %XX what "
            "is neither letter nor digit of ASCII"
        ) from None
