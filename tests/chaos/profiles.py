"""Profiles: how large a run is. Short ones are part of the tests, long ones are for `python -m tests.chaos`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tests.chaos.application import Service
from tests.chaos.broker import Broker, SingleNode, WitnessedNode
from tests.chaos.cluster import Cluster
from tests.chaos.database import MEBIBYTE, PostgresqlDatabase, SqliteDatabase
from tests.chaos.log import LoggedDatabase
from tests.chaos.mariadb import MariadbDatabase
from tests.chaos.processes import PRODUCER, RELAY, WORKER
from tests.chaos.schedule import (
    DATABASE,
    ON_CLUSTER,
    ON_HTTP,
    ON_LOG,
    ON_MARIADB,
    ON_MARIADB_AND_RABBITMQ,
    ON_POSTGRESQL,
    ON_RABBITMQ,
    ON_SQLITE,
    ON_STANDBY,
    ON_TWO_SERVICES,
    SHORTLY_ON_HTTP,
    SHORTLY_ON_LOG,
    SHORTLY_ON_TWO_SERVICES,
)
from tests.chaos.standby import LaggingPair, PostgresqlPair
from tests.chaos.tables import CONFIRMED, ORDERED, SHIPPED

_FEW = {PRODUCER: 2, RELAY: 1, WORKER: 2}
_MANY = {PRODUCER: 2, RELAY: 2, WORKER: 3}


@dataclass(frozen=True)
class Profile:
    """How large a run is."""

    name: str
    services: Sequence[Service]
    kinds: Sequence[str]  # of faults
    seconds: float  # over which the faults are spread
    faults: int
    messages: int  # to emit at least, those that are rolled back not counted
    broker: type[Broker] | None = None
    accounts: int = 0  # whose balances the services keep
    lease: float = 3.0
    poll_interval: float = 0.5
    slow: float = 3.5  # seconds, longer than a lease
    slow_share: float = 0.01  # of all messages
    kills: float = 0.0005  # share of messages that kill their worker
    mistakes: float = 0.02  # share of messages, and of transactions, with which something careless is done
    disk: int = 256 * MEBIBYTE
    backlog: int = 300  # messages that wait, above which producers hold back
    patience: float = 180.0  # seconds without any progress after which something is stuck

    @property
    def members(self) -> Mapping[str, int]:
        """How many there are of each role, in all services."""
        return sum((Counter(service.members) for service in self.services), Counter())

    @property
    def targets(self) -> Mapping[str, int]:
        """Of whom there are several, when a fault looks for somebody to strike."""
        databases = {target: len(self.services) for target in DATABASE if len(self.services) > 1}
        return {**self.members, **databases}

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


_SHORT = Profile(
    "postgresql",
    (Service(PostgresqlDatabase, _FEW),),
    ON_POSTGRESQL,
    seconds=22,
    faults=17,
    messages=1000,
    slow_share=0.03,
    kills=0.002,
    mistakes=0.04,
)
_SHORT_ON_SQLITE = Profile(
    "sqlite",
    (Service(SqliteDatabase, _FEW),),
    ON_SQLITE,
    seconds=12,
    faults=8,
    messages=300,
    slow=0.1,
    kills=0.003,
    mistakes=0.03,
    disk=64 * MEBIBYTE,
)
_LONG = Profile(
    "postgresql",
    (Service(PostgresqlDatabase, _MANY),),
    ON_POSTGRESQL,
    seconds=600,
    faults=150,
    messages=52_000,
    lease=5.0,
    slow=7.0,
    disk=1024 * MEBIBYTE,
    backlog=2000,
)


def _over_rabbitmq(profile: Profile) -> Profile:
    return replace(profile, name="rabbitmq", kinds=ON_RABBITMQ, broker=SingleNode)


_ORDERS = Service(
    PostgresqlDatabase, {PRODUCER: 2, RELAY: 1, WORKER: 1}, "tests.chaos.services:ordering", (ORDERED, CONFIRMED)
)
_SHIPPING = Service(PostgresqlDatabase, {RELAY: 1, WORKER: 2}, "tests.chaos.services:shipping", (SHIPPED,))


def _of_two_services(profile: Profile) -> Profile:
    return replace(
        _over_rabbitmq(profile),
        name="two-services",
        services=(_ORDERS, _SHIPPING),
        kinds=ON_TWO_SERVICES,
        accounts=50,
    )


_SENDING = Service(PostgresqlDatabase, {PRODUCER: 2, RELAY: 3})
_RECEIVING = Service(PostgresqlDatabase, {WORKER: 1}, takes_http=True)


def _over_http(profile: Profile) -> Profile:
    return replace(profile, name="http", services=(_SENDING, _RECEIVING), kinds=ON_HTTP)


def _on_mariadb(profile: Profile) -> Profile:
    services = tuple(replace(service, database=MariadbDatabase) for service in profile.services)
    return replace(profile, name="mariadb", services=services, kinds=ON_MARIADB)


def _from_the_log(profile: Profile, members: Mapping[str, int] = _MANY) -> Profile:
    """With two relays, one of which stands by."""
    return replace(
        profile, name="wal", services=(Service(LoggedDatabase, members),), kinds=ON_LOG, broker=WitnessedNode
    )


def _with_standby(profile: Profile, pair: type[PostgresqlPair], name: str) -> Profile:
    services = tuple(replace(service, database=pair) for service in profile.services)
    return replace(_over_rabbitmq(profile), name=name, services=services, kinds=ON_STANDBY)


SHORT: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        _SHORT,
        replace(_over_rabbitmq(_SHORT), seconds=28, faults=24, messages=1000, slow_share=0.02),
        _SHORT_ON_SQLITE,
        replace(_on_mariadb(_SHORT), seconds=16, messages=600),
        replace(
            _of_two_services(_SHORT),
            kinds=SHORTLY_ON_TWO_SERVICES,
            seconds=10,
            faults=13,
            messages=200,
            slow_share=0.005,
            mistakes=0.02,
            backlog=60,
        ),
        replace(
            _over_http(_SHORT), kinds=SHORTLY_ON_HTTP, seconds=16, faults=17, messages=400, slow_share=0.005, kills=0.0
        ),
        replace(
            _from_the_log(_SHORT, {PRODUCER: 1, RELAY: 2, WORKER: 1}),
            kinds=SHORTLY_ON_LOG,
            seconds=6,
            faults=7,
            messages=250,
            slow_share=0.005,
            kills=0.0,
            mistakes=0.0,
        ),
    )
}

LONG: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        _LONG,
        replace(_over_rabbitmq(_LONG), messages=100_000, slow_share=0.003, mistakes=0.01, backlog=3000),
        replace(
            _SHORT_ON_SQLITE, seconds=180, faults=40, messages=5_000, kills=0.001, mistakes=0.03, disk=256 * MEBIBYTE
        ),
        replace(_on_mariadb(_LONG), messages=30_000),
        replace(
            _over_rabbitmq(_on_mariadb(_LONG)),
            name="mariadb-rabbitmq",
            kinds=ON_MARIADB_AND_RABBITMQ,
            messages=50_000,
            slow_share=0.003,
            mistakes=0.01,
            backlog=2000,
        ),
        replace(_of_two_services(_LONG), messages=30_000, slow_share=0.003, mistakes=0.005, backlog=1000),
        replace(_over_http(_LONG), messages=30_000, slow_share=0.003, backlog=1000),
        replace(_from_the_log(_LONG), faults=180, messages=60_000, slow_share=0.003, mistakes=0.01, backlog=3000),
    )
}

_FAIL_OVER = replace(_LONG, faults=90, messages=30_000, slow_share=0.003, mistakes=0.01, backlog=1000)

# Each of these takes servers enough for a machine of its own, so it runs where it is named.
FAIL_OVERS: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        # RabbitMQ hands on again after three minutes what was on its way between two queues when a leader died.
        replace(_over_rabbitmq(_FAIL_OVER), name="cluster", kinds=ON_CLUSTER, broker=Cluster, patience=600.0),
        _with_standby(_FAIL_OVER, PostgresqlPair, "standby"),
        # Without mistakes: what a listener commits by itself may vanish like everything else.
        replace(_with_standby(_FAIL_OVER, LaggingPair, "lagging-standby"), mistakes=0.0),
    )
}
