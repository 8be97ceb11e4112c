"""Rounds: what a relay does again and again, done by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from outbox import Outbox, RetryPolicy
from outbox.core.events import CircuitOpened
from outbox.core.store import CircuitState
from outbox.outbound.circuit import Breaker, Circuits
from outbox.outbound.publishing import Publisher
from outbox.testing.clock import advance
from tests.support.observing import Recorder

from .destinations import Sink

LEASE = timedelta(minutes=1)
BATCH = 8


class Process:
    """One relay's rounds, made by hand, with a clock that stands still unless it is moved."""

    def __init__(self, outbox: Outbox, sink: Sink, restart_delay: Any = None) -> None:
        self.outbox, self.sink = outbox, sink
        self.recorder = Recorder()
        self.now = 1000.0
        circuits = Circuits(outbox.store, self.clock)
        self.breaker = Breaker(
            outbox.store,
            circuits,
            None,
            batch_size=BATCH,
            lease=LEASE,
            observe=self.recorder,
            restart_delay=restart_delay,
            clock=self.clock,
            chance=lambda: 0.5,
        )
        self.publisher = Publisher(
            outbox.store.feed,
            sink,
            batch_size=BATCH,
            lease=LEASE,
            retry_policy=RetryPolicy.sequence((60,)),
            observe=self.recorder,
            breaker=self.breaker,
        )
        self.round = self.publisher.round

    def clock(self) -> float:
        return self.now

    async def pass_time(self, seconds: float) -> None:
        """For the rows and for this process."""
        await advance(self.outbox, seconds)
        self.now += seconds

    @property
    def pauses(self) -> list[float]:
        return [event.pause.total_seconds() for event in self.recorder.of(CircuitOpened)]


async def state(outbox: Outbox) -> CircuitState | None:
    circuits = await outbox.store.circuits.all()
    return circuits[0].state if circuits else None
