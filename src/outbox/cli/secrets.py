"""Secrets: kept out of everything that is shown, wherever the text came from."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, unquote, urlsplit

from outbox.environment import PREFIX

HIDDEN = "***"
EXAMPLE = "user:password@"  # of no user: it stands in our own advice

_USER_INFORMATION = re.compile(r"(?<=://)[^\s/@\"']*:[^\s\"']*@")  # to the last @: a password may hold others
_NAMES = re.compile(r"password|passwd|secret|token|key|signature|^sig$", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"'<>]+")  # routes hold several, in JSON
_ENDS = re.compile(r"[@/?#:]")  # what ends a password too early if it is not quoted


def redacted(text: str) -> str:
    """The text without credentials: those of any URL in it, and those of the environment's URLs anywhere."""
    text = _USER_INFORMATION.sub(lambda found: found[0] if found[0] == EXAMPLE else f"{HIDDEN}@", text)
    for secret in _known():
        text = text.replace(secret, HIDDEN)
    return text


def _known() -> set[str]:
    """The secrets that the environment holds, and the passwords in its URLs, as written and as meant."""
    found: set[str] = set()
    for name, value in os.environ.items():
        if name.startswith(PREFIX) and "://" in value:
            found.update(*map(_of, _URL.findall(value)))
        elif name.startswith(PREFIX) and name.endswith("SECRETS"):
            found.update(re.split(r"[\s,]+", value))
    # A very short one would turn ordinary words into stars and so tell where it stands.
    return {secret for secret in found if len(secret) > 3}


def _of(url: str) -> set[str]:
    """The password of a URL, and its parts where it was not quoted and may have been cut."""
    try:
        parts = urlsplit(url)
    except ValueError:  # that of a user is then what stands between the first colon and the last @
        return set(_ENDS.split(url.partition("://")[2].rpartition("@")[0].partition(":")[2])) - {""}
    before = url.partition("://")[2].rpartition("@")[0] if "@" in parts.path else parts.netloc.rpartition("@")[0]
    written = before.partition(":")[2]
    queried = [value for name, value in parse_qsl(parts.query) if _NAMES.search(name)]
    return {secret for secret in (written, unquote(written), *_ENDS.split(written), *queried) if secret}
