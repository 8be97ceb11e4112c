"""Profiles: how large a run is. Short ones are part of the tests, long ones are for `python -m tests.chaos`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.chaos.broker import RabbitmqDatabase
from tests.chaos.database import MEBIBYTE, Database, PostgresqlDatabase, SqliteDatabase
from tests.chaos.processes import PRODUCER, RELAY, WORKER
from tests.chaos.schedule import ON_POSTGRESQL, ON_RABBITMQ, ON_SQLITE

_KINDS: Mapping[type[Database], Sequence[str]] = {
    PostgresqlDatabase: ON_POSTGRESQL,
    RabbitmqDatabase: ON_RABBITMQ,
    SqliteDatabase: ON_SQLITE,
}


@dataclass(frozen=True)
class Profile:
    """How large a run is."""

    database: type[Database]
    seconds: float  # over which the faults are spread
    faults: int
    messages: int  # to emit at least, those that are rolled back not counted
    members: Mapping[str, int] = field(default_factory=lambda: {PRODUCER: 2, RELAY: 1, WORKER: 2})
    lease: float = 3.0
    poll_interval: float = 0.5
    slow: float = 3.5  # seconds, longer than a lease
    slow_share: float = 0.01  # of all messages
    kills: float = 0.0005  # share of messages that kill their worker
    disk: int = 256 * MEBIBYTE
    backlog: int = 300  # messages that wait, above which producers hold back
    patience: float = 180.0  # seconds without any progress after which something is stuck

    @property
    def kinds(self) -> Sequence[str]:
        return _KINDS[self.database]

    @property
    def rate(self) -> float:
        """What each producer has to emit in a second: a third more than if none of it were rolled back or refused."""
        return 1.35 * self.messages / self.seconds / self.members[PRODUCER]

    def lasting(self, minutes: float) -> Profile:
        """The same density of faults and messages, for another time."""
        longer = minutes * 60 / self.seconds
        return replace(
            self,
            seconds=minutes * 60,
            faults=max(len(self.kinds), round(self.faults * longer)),
            messages=round(self.messages * longer),
        )


_SHORT = Profile(PostgresqlDatabase, seconds=22, faults=17, messages=1000, slow_share=0.03, kills=0.002)
_SHORT_ON_SQLITE = Profile(
    SqliteDatabase, seconds=12, faults=8, messages=300, slow=0.1, kills=0.003, disk=64 * MEBIBYTE
)
_LONG = Profile(
    PostgresqlDatabase,
    seconds=600,
    faults=150,
    messages=52_000,
    members={PRODUCER: 2, RELAY: 2, WORKER: 3},
    lease=5.0,
    slow=7.0,
    disk=1024 * MEBIBYTE,
    backlog=2000,
)

SHORT: Mapping[str, Profile] = {
    "postgresql": _SHORT,
    "rabbitmq": replace(_SHORT, database=RabbitmqDatabase, seconds=40, faults=28, messages=1500, slow_share=0.02),
    "sqlite": _SHORT_ON_SQLITE,
}

LONG: Mapping[str, Profile] = {
    "postgresql": _LONG,
    "rabbitmq": replace(_LONG, database=RabbitmqDatabase, messages=100_000, slow_share=0.003, backlog=3000),
    "sqlite": replace(_SHORT_ON_SQLITE, seconds=180, faults=40, messages=5_000, kills=0.001, disk=256 * MEBIBYTE),
}
