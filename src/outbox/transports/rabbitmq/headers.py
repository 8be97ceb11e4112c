"""Headers: the names under which messages carry what is ours, and how large they may be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

KEY = "outbox-key"
CREATED_AT = "outbox-created-at"  # this and the next three in microseconds since 1970
DUE_AT = "outbox-due-at"
EXPIRES_AT = "outbox-expires-at"
DIED_AT = "outbox-died-at"
ROUTING_KEY = "outbox-routing-key"  # the first one; a retry travels under the name of its queue
ATTEMPT = "outbox-attempt"
CRASHES = "outbox-crashes"
ON_TRIAL = "outbox-on-trial"  # this very copy is a start: if it comes back, its worker died of it
HISTORY = "outbox-history"
QUEUE = "outbox-queue"
REASON = "outbox-reason"
ERROR = "outbox-error"


MOST_COUNTED = 1_000_000  # attempts, crashes, returns: one more is written as this many, and more are not believed
LARGEST_PROPERTIES = 131_072 - 64  # bytes: they travel in one frame, and this is what brokers allow for one
LARGEST_CARRIED = 96 * 1024  # bytes of others' headers that surely fit into a frame together with ours
PERSISTENT = b"\x02"

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Unsendable(Exception):
    """A message that no broker could take as it is."""


def microseconds(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND


def too_large(body: bytes, largest: int) -> str:
    """Why a body is not taken."""
    return f"its body has {len(body)} bytes, more than max_body_size={largest}: raise max_body_size, then replay it"
