"""URLs: where a password that was not quoted would end up in what is shown."""

from __future__ import annotations

import re

from outbox.core.errors import ConfigurationError

_END_OF_AUTHORITY = re.compile(r"[/?#]")


def check_credentials(url: str, what: str) -> None:
    """Refuse a URL with an `@` behind its host: a `/`, `?` or `#` in a password ends it too early.

    The rest of the password would be taken for a path, which is shown: it names a virtual host in errors and tables.
    """
    rest = url.partition("://")[2]
    authority = _END_OF_AUTHORITY.split(rest, 1)[0]
    path, _, query = rest[len(authority) :].partition("?")
    if "@" in path or ("@" in query and "@" not in authority):
        raise ConfigurationError(
            f"{what} has an @ after its host: in a password write / as %2F, ? as %3F and # as %23, "
            "and elsewhere @ as %40"
        )
