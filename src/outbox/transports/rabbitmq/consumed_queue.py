"""ConsumedQueue: a listener's queue, and what its channels have in common."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.listener import Listener
from outbox.transports.rabbitmq.lost_runs import LostRuns
from outbox.transports.rabbitmq.poison import PoisonSuspects
from outbox.transports.rabbitmq.prefetching import ConsumerPrefetch
from outbox.transports.rabbitmq.republishing import Republisher


@dataclass(frozen=True, slots=True)
class ConsumedQueue:
    """Made by its consumer, for each of the channels that it has one after another."""

    name: str  # as the broker calls it
    listener: Listener
    largest_body: int  # bytes
    republisher: Republisher
    suspects: PoisonSuspects
    lost_runs: LostRuns
    prefetch: ConsumerPrefetch
