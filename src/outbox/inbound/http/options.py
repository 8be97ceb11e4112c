"""Options: what http_app() was given, checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final

from outbox.core.durations import Retention, Seconds, as_lifetime, configured, in_words
from outbox.core.errors import ConfigurationError
from outbox.core.message import LARGEST_HEADERS
from outbox.core.webhooks import TOLERANCE, AnySecrets, Secrets
from outbox.inbound.http.request import MODES, Mode


class Required(Enum):
    """Sentinel: this argument has no default."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAppOptions:
    """Which requests are taken, and how many at once."""

    secrets: Secrets | None
    max_body_size: int  # bytes of a message
    max_request_size: int  # bytes of all that one request brings
    most_at_once: int  # requests that are read, and as many that are stored
    timeout: float  # seconds for a request to arrive, and again for it to be stored
    modes: frozenset[Mode]  # in which requests are taken

    @property
    def seals(self) -> bool:
        """Whether a signed request could be read in several ways: in structured mode everything that counts is signed.

        What is read in one way is known then, and not taken in another.
        """
        return self.secrets is not None and self.modes != {"structured"}

    @classmethod
    def of(
        cls,
        secrets: AnySecrets | Required | None,
        max_request_size: int | None,
        most_at_once: int,
        timeout: Seconds,
        modes: Collection[Mode],
        *,
        max_body_size: int,
        inbox_retention: Retention,
    ) -> HttpAppOptions:
        if max_request_size is None:
            max_request_size = largest_request(max_body_size)
        chosen = _chosen(secrets)
        if chosen is not None:
            _check_outlives_signatures(inbox_retention)
        return cls(
            secrets=chosen,
            max_body_size=max_body_size,
            max_request_size=_count("max_request_size", max_request_size),
            most_at_once=_count("most_at_once", most_at_once),
            timeout=configured(as_lifetime, timeout, what="timeout").total_seconds(),
            modes=_modes(modes),
        )


def largest_request(max_body_size: int) -> int:
    """What a message of the largest size may come to as an event: in base64, with all the headers it may have."""
    return 2 * max_body_size + 4 * LARGEST_HEADERS


def _chosen(secrets: AnySecrets | Required | None) -> Secrets | None:
    if isinstance(secrets, Required):
        raise ConfigurationError(
            "http_app() needs the secrets that its senders sign with: secrets='whsec_…', or several for a rotation; "
            "secrets=None takes whatever anybody sends, for senders that are known by other means"
        )
    return None if secrets is None else Secrets.of(secrets)


def _modes(modes: Collection[Mode]) -> frozenset[Mode]:
    if isinstance(modes, str) or not modes or not set(modes) <= set(MODES):
        raise ConfigurationError(f"modes={modes!r}: some of {', '.join(map(repr, MODES))}")
    return frozenset(modes)


def _check_outlives_signatures(retention: Retention) -> None:
    """A request is known again for as long as its signature is valid: by a clock that is ahead, twice the tolerance."""
    if isinstance(retention, timedelta) and retention < 2 * TOLERANCE:
        raise ConfigurationError(
            f"inbox_retention={in_words(retention)}: a signed request that is sent again would be new before its "
            f"signature is too old; keep entries for at least {in_words(2 * TOLERANCE)}"
        )


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: a whole number, at least 1")
    return value
