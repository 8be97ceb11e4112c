"""Schedule: which faults strike whom and when. The same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from tests.chaos.processes import PRODUCER, RELAY, WORKER

ANYBODY = (PRODUCER, RELAY, WORKER)
EVERYBODY = ("everybody",)
DATABASE = ("database",)
BROKER = ("broker",)
DOORWAY = ("doorway",)


@dataclass(frozen=True)
class Kind:
    """A kind of fault: whom it strikes, how often compared with others, and for how many leases it lasts."""

    targets: tuple[str, ...]
    weight: int = 1
    shortest: float = 0.0
    longest: float = 0.0


KINDS: Mapping[str, Kind] = {
    "kill a producer": Kind((PRODUCER,), 2),
    "kill a relay": Kind((RELAY,), 2),
    "kill a worker": Kind((WORKER,), 3),
    "freeze": Kind((WORKER, RELAY, PRODUCER, WORKER), 2, 1.3, 2.5),
    "rolling restart": Kind(EVERYBODY),
    "wrong clock": Kind((WORKER, PRODUCER, RELAY)),
    "full disk": Kind(DATABASE, 1, 0.5, 1.5),
    "crash the database": Kind(DATABASE, 1, 0.0, 0.8),
    "restart the database": Kind(DATABASE, 1, 0.0, 0.3),
    "end sessions": Kind(DATABASE, 3),
    "cut": Kind(ANYBODY, 3),
    "black hole": Kind((WORKER, RELAY, PRODUCER), 2, 1.2, 2.5),
    "delay": Kind(ANYBODY, 2, 1.0, 2.5),
    "cut at commit": Kind((PRODUCER, WORKER, PRODUCER, RELAY), 3),
    "cut at write": Kind((WORKER, RELAY, PRODUCER), 3),
}

KINDS_OF_BROKER: Mapping[str, Kind] = {
    "crash the broker": Kind(BROKER, 1, 0.0, 0.8),
    "restart the broker": Kind(BROKER, 1, 0.0, 0.3),
    "memory alarm": Kind(BROKER, 2, 1.0, 2.0),
    "delete a binding": Kind(BROKER, 1, 0.5, 1.5),
    "delete a queue": Kind(BROKER),
    "cut from the broker": Kind((RELAY, WORKER), 3),
    "black hole to the broker": Kind((WORKER, RELAY), 2, 1.2, 2.5),
    "cut at confirm": Kind((RELAY, WORKER, RELAY), 3),
}

KINDS_OF_CLUSTER: Mapping[str, Kind] = {
    "kill the leader": Kind(BROKER, 20, 0.2, 1.0),
    "kill a node": Kind(BROKER, 4, 0.2, 1.0),
    "restart a node": Kind(BROKER, 4, 0.0, 0.3),
}

KINDS_OF_STANDBY: Mapping[str, Kind] = {
    "fail over": Kind(DATABASE, 20, 0.02, 0.4),  # for so long the standby gets nothing before the primary dies
}

KINDS_OF_SERVICES: Mapping[str, Kind] = {
    "crash everything": Kind(EVERYBODY, 1, 0.0, 0.8),
    "restart everything": Kind(EVERYBODY, 1, 0.0, 0.3),
}

KINDS_OF_HTTP: Mapping[str, Kind] = {
    "unreachable": Kind(DOORWAY, 3, 0.5, 2.5),
    "silence": Kind(DOORWAY, 2, 1.0, 4.0),
    "turned away": Kind(DOORWAY, 3, 0.3, 1.5),
    "resets": Kind(DOORWAY, 2, 0.3, 1.5),
    "cut from the receiver": Kind((RELAY,), 3),
    "cut at answer": Kind((RELAY,), 4),
}

KINDS_OF_LOG: Mapping[str, Kind] = {
    "kill the active relay": Kind(DATABASE, 4),
    "kill before the confirm": Kind(DATABASE, 4),
    "freeze the active relay": Kind(DATABASE, 3, 1.3, 2.5),
    "end the stream": Kind(DATABASE, 3),
    "drop the slot": Kind(DATABASE, 2, 0.0, 0.8),
}

KINDS_OF_MARIADB: Mapping[str, Kind] = {"deadlock": Kind(DATABASE, 4)}

ON_POSTGRESQL = tuple(KINDS)
ON_RABBITMQ = (*KINDS, *KINDS_OF_BROKER)

# Not a full disk: the server would wait for an operator, its data and all.
ON_MARIADB = (*(kind for kind in KINDS if kind != "full disk"), *KINDS_OF_MARIADB)
ON_MARIADB_AND_RABBITMQ = (*ON_MARIADB, *KINDS_OF_BROKER)

# Not a deleted queue: a node that is killed within half a second of its declaration forgets its name.
ON_CLUSTER = (
    *(kind for kind in KINDS if kind not in ("full disk", "wrong clock")),
    *(kind for kind in KINDS_OF_BROKER if kind not in ("crash the broker", "restart the broker", "delete a queue")),
    *KINDS_OF_CLUSTER,
)
# The disks are of the two servers, which are other ones after each failover.
ON_STANDBY = (
    *(kind for kind in KINDS if kind != "full disk"),
    *(kind for kind in KINDS_OF_BROKER if kind in ("cut from the broker", "cut at confirm")),
    *KINDS_OF_STANDBY,
)

# Not a deleted binding: the rig's own queue takes everything, so no message would go nowhere.
ON_LOG = (
    *(kind for kind in ON_RABBITMQ if kind not in ("full disk", "delete a binding")),
    *KINDS_OF_LOG,
)

SHORTLY_ON_LOG = (*KINDS_OF_LOG, "crash the database", "cut from the broker")

ON_TWO_SERVICES = (*ON_RABBITMQ, *KINDS_OF_SERVICES)
SHORTLY_ON_TWO_SERVICES = (
    "kill a producer",
    "kill a relay",
    "kill a worker",
    "freeze",
    "crash the database",
    "cut",
    "cut at commit",
    "cut at write",
    "cut from the broker",
    "black hole to the broker",
    "cut at confirm",
    "crash everything",
)

# Not a wrong clock: what is signed an hour ago or hence is refused, and rightly so.
ON_HTTP = (*(kind for kind in KINDS if kind != "wrong clock"), *KINDS_OF_HTTP)
SHORTLY_ON_HTTP = (
    "kill a producer",
    "kill a relay",
    "kill a worker",
    "freeze",
    "crash the database",
    "restart the database",
    "cut",
    "cut at commit",
    "cut at write",
    *KINDS_OF_HTTP,
)

ON_SQLITE = (
    "kill a producer",
    "kill a relay",
    "kill a worker",
    "freeze",
    "rolling restart",
    "wrong clock",
    "full disk",
)


@dataclass(frozen=True)
class Planned:
    """A fault to come."""

    at: float  # seconds from the beginning
    kind: str
    target: str
    seconds: float  # for how long
    chance: float  # between 0 and 1, for whatever else the fault has to choose


def schedule(
    seed: int, kinds: Sequence[str], count: int, seconds: float, lease: float, members: Mapping[str, int]
) -> list[Planned]:
    """`count` faults over so many seconds, every kind among them, in an order and at moments of chance."""
    chance = random.Random(seed)
    known = {
        **KINDS,
        **KINDS_OF_BROKER,
        **KINDS_OF_CLUSTER,
        **KINDS_OF_STANDBY,
        **KINDS_OF_SERVICES,
        **KINDS_OF_HTTP,
        **KINDS_OF_MARIADB,
        **KINDS_OF_LOG,
    }
    chosen = list(kinds) + chance.choices(kinds, [known[kind].weight for kind in kinds], k=max(0, count - len(kinds)))
    chosen = chosen[:count]
    chance.shuffle(chosen)
    targets = {kind: cycle(known[kind].targets) for kind in kinds}
    step = seconds / count
    return [
        Planned(
            at=(position + chance.random() * 0.8) * step,
            kind=kind,
            target=_member(chance, next(targets[kind]), members),
            seconds=lease * chance.uniform(known[kind].shortest, known[kind].longest),
            chance=chance.random(),
        )
        for position, kind in enumerate(chosen)
    ]


def _member(chance: random.Random, target: str, members: Mapping[str, int]) -> str:
    return f"{target}-{chance.randrange(members[target])}" if target in members else target
