"""Webhooks: signatures as Standard Webhooks has them, made and verified."""

from __future__ import annotations

import binascii
import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import quote

from outbox.core.errors import ConfigurationError, SignatureInvalid

ID: Final = "webhook-id"
TIMESTAMP: Final = "webhook-timestamp"
SIGNATURE: Final = "webhook-signature"
HEADERS: Final = frozenset({ID, TIMESTAMP, SIGNATURE})

TOLERANCE: Final = timedelta(minutes=5)  # between the sender's clock and ours, to either side
MOST_SIGNATURES: Final = 32  # of one request; senders have one for each secret, and two while they change it
SHORTEST_SECRET, LONGEST_SECRET = 24, 64  # bytes

_PREFIX = "whsec_"
_VERSION = "v1,"  # HMAC-SHA256; signatures of other versions are passed by
_NUMBER = re.compile(r"[0-9]{1,15}")
# An id that holds the time of another reading of the same signed text: seconds have had ten digits since 2001. And one
# that begins as marks do.
_AMBIGUOUS = re.compile(r"\A\.|\.[0-9]{10,15}(?:\.|\Z)")
_PLAIN_ID = re.compile(r"[A-Za-z0-9_~-]+")  # as quoting would leave it
_HOW = "`whsec_` and the base64 of 24 to 64 random bytes"


class Secrets:
    """The keys that sender and receiver share. With several, each signs, and any of them verifies: for rotation."""

    __slots__ = ("_keys",)

    def __init__(self, *secrets: str | bytes) -> None:
        """Texts begin with `whsec_`; bytes are the key itself."""
        if not secrets:
            raise ConfigurationError(f"no webhook secret: give at least one, {_HOW}")
        self._keys = tuple(hmac.new(_key(secret), digestmod="sha256") for secret in secrets)

    @classmethod
    def of(cls, given: AnySecrets) -> Secrets:
        """One secret, several, or what was made of them before."""
        if isinstance(given, Secrets):
            return given
        return cls(given) if isinstance(given, str | bytes) else cls(*given)

    def __repr__(self) -> str:
        """How many there are, never which."""
        return f"<Secrets: {len(self._keys)}>"

    def signatures(self, content: bytes) -> list[str]:
        """One for each key, the newest first if they were given so."""
        return [_signature(key, content) for key in self._keys]

    def marks(self, id: str, content: bytes, given: Sequence[bytes]) -> tuple[str, ...]:
        """By what an id is known among those of its sender: one for each key that made one of the given signatures.

        A mark tells neither the key nor the id. It begins with a dot, and nothing that is signed does.
        """
        # Every pair is compared, each in constant time: how long it takes tells nothing of how close a guess came.
        made = [(key, _signature(key, content).encode()) for key in self._keys]  # the body is read once for each key
        signers = [key for key, own in made if sum([hmac.compare_digest(own, each) for each in given])]
        return tuple(_digest(key, f".{id}".encode()).hex() for key in signers)


AnySecrets = Secrets | str | bytes | Iterable[str | bytes]  # as a caller may give them


def sign(secrets: Secrets, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of one attempt: the id is the same with every attempt, the time in seconds since 1970 is not."""
    safe_id = header_id(id)
    signatures = secrets.signatures(_content(safe_id, str(timestamp), body))
    return {ID: safe_id, TIMESTAMP: str(timestamp), SIGNATURE: " ".join(signatures)}


@dataclass(frozen=True, slots=True)
class ClaimedSignature:
    """What a request says of its signature."""

    id: str
    timestamp: str
    signatures: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Verified:
    """The id of a webhook that is signed as it should be, and by what it is known: one mark for each of its signers."""

    id: str
    marks: tuple[str, ...]


def claimed(headers: Mapping[str, str], now: float, tolerance: timedelta = TOLERANCE) -> ClaimedSignature:
    """What can be checked before the body is there; raises SignatureInvalid.

    The names of the headers are in lower case, and `now` is in seconds since 1970.
    """
    id, timestamp, signatures = (_header(headers, name) for name in (ID, TIMESTAMP, SIGNATURE))
    if _AMBIGUOUS.search(id):
        raise SignatureInvalid(f"{ID} has a time behind a dot: what was signed could be read in two ways")
    if not _NUMBER.fullmatch(timestamp):
        raise SignatureInvalid(f"{TIMESTAMP} is no number: send the seconds since 1970")
    if abs(now - int(timestamp)) > tolerance.total_seconds():
        raise SignatureInvalid(f"{TIMESTAMP} is not within {tolerance} of the time here: sign each attempt anew")
    given = [each.encode() for each in signatures.split(" ", MOST_SIGNATURES)]
    if len(given) > MOST_SIGNATURES:
        raise SignatureInvalid(f"{SIGNATURE} has more than {MOST_SIGNATURES} signatures: send one for each secret")
    return ClaimedSignature(id, timestamp, given)


def verified(secrets: Secrets, claim: ClaimedSignature, body: bytes) -> Verified:
    """What one of the secrets signed exactly so; raises SignatureInvalid."""
    marks = secrets.marks(claim.id, _content(claim.id, claim.timestamp, body), claim.signatures)
    if not marks:
        raise SignatureInvalid(f"no signature in {SIGNATURE} was made with a secret known here over exactly this body")
    return Verified(claim.id, marks)


def verify(
    secrets: Secrets, headers: Mapping[str, str], body: bytes, now: float, tolerance: timedelta = TOLERANCE
) -> str:
    """The webhook's id if one of the secrets signed exactly this, not long ago; raises SignatureInvalid."""
    return verified(secrets, claimed(headers, now, tolerance), body).id


def header_id(id: str) -> str:
    """An id as it travels: without dots, which part what is signed, and nothing that a header cannot hold."""
    return id if _PLAIN_ID.fullmatch(id) else quote(id, safe="").replace(".", "%2E")


def _signature(key: hmac.HMAC, content: bytes) -> str:
    return _VERSION + b64encode(_digest(key, content)).decode()


def _digest(key: hmac.HMAC, content: bytes) -> bytes:
    """Of a copy: preparing the key is most of the work, and done once."""
    digest = key.copy()
    digest.update(content)
    return digest.digest()


def _content(id: str, timestamp: str, body: bytes) -> bytes:
    return f"{id}.{timestamp}.".encode() + body


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value or not value.isascii():
        raise SignatureInvalid(f"the header {name} is missing or not ASCII: sign requests as Standard Webhooks says")
    return value


def _key(secret: str | bytes) -> bytes:
    """An error never repeats a secret, not even in part."""
    if isinstance(secret, str):
        if not secret:
            raise ConfigurationError(f"a webhook secret is {_HOW}; this one is empty")
        if not secret.startswith(_PREFIX):
            raise ConfigurationError(f"a webhook secret is {_HOW}; this one has no such prefix")
        try:
            encoded = secret.removeprefix(_PREFIX)
            key = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)  # some leave the padding out
        except (binascii.Error, ValueError):
            raise ConfigurationError(f"a webhook secret is {_HOW}; this one is no base64") from None
    elif isinstance(secret, bytes):
        key = secret
    else:
        raise ConfigurationError(f"a webhook secret is {_HOW}, or these bytes, not {type(secret).__name__}")
    if not SHORTEST_SECRET <= len(key) <= LONGEST_SECRET:
        raise ConfigurationError(f"a webhook secret is {_HOW}; this one has {len(key)}")
    return key
