"""Headers: names that mean something to a broker. `emit` refuses them whatever the transport: it may change."""

from __future__ import annotations

OURS = "outbox-"  # what the names of our own headers begin with
# Two of them as kbairak's outbox calls them: on RabbitMQ they are written and read beside our own.
ALSO_TRACKING_IDS = "x-outbox-tracking-ids"
ALSO_ROUTING_KEY = "x-original-routing-key"
ALSO_OURS = frozenset({ALSO_TRACKING_IDS, ALSO_ROUTING_KEY})

REROUTING = frozenset({"CC", "BCC"})  # these make RabbitMQ send copies elsewhere, and they are lists there
# What RabbitMQ writes. Carried on, `x-death` lets it drop a message as going in circles.
_BROKERS = frozenset({"x-death", "x-delivery-count", "x-acquired-count", "x-stream-offset"})
_BROKERS_PREFIXES = ("x-first-death-", "x-last-death-", "x-opt-")


def is_brokers(name: str) -> bool:
    """Whether a broker writes headers of this name itself."""
    return name in _BROKERS or name.startswith(_BROKERS_PREFIXES)


def is_ours(name: str) -> bool:
    """Whether this library writes headers of this name."""
    return name.startswith(OURS) or name in ALSO_OURS


def is_reserved(name: str) -> bool:
    """Whether a header of this name cannot travel as the caller's own."""
    return is_ours(name) or name in REROUTING or is_brokers(name)
