"""Against: the library as it is beside itself at an earlier commit, in turns: what became slower, and what faster."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from bench import broker as brokers
from bench import contenders, http_relay, inbox, rabbitmq
from bench.broker import Broker, OnBroker
from bench.contenders import Contender
from bench.database import Database
from bench.drain import drain
from bench.latency import latency
from bench.processes import ROOT, program
from bench.report import Report, median, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios

NOW = "now"
RATES = (200, 500)  # messages a second, for latency
SECONDS = 5  # of each


@dataclass(frozen=True)
class Version:
    """The sources of a commit, and where its messages lie."""

    name: str
    sources: Path
    mark: str  # before the names of its tables, exchanges and queues

    def of(self, contender: Contender) -> Contender:
        """The contender, run by these sources."""
        return replace(contender, environment={**contender.environment, **self._sources})

    def over(self, contender: OnBroker) -> OnBroker:
        """The same over RabbitMQ, where both would share a queue."""
        environment = {**contender.environment, **self._sources, "OUTBOX_QUEUE_PREFIX": self.mark}
        return replace(contender, store=contender.store and self.of(contender.store), environment=environment)

    @property
    def _sources(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{self.sources}:{ROOT}"}


@dataclass(frozen=True)
class Speed:
    """Of one version, in one round: messages a second, microseconds of processor time, milliseconds."""

    drain: float
    drain_time: float
    p50: float
    p50_of_many: float
    relay: float
    relay_time: float
    consume: float
    consume_time: float
    over_rabbitmq: float
    inbox: float
    http: float

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {number(getattr(self, field.name))}" for field in fields(self))


WHAT = {
    "drain": "drain: messages/s",
    "drain_time": "drain: processor time of the worker, µs",
    "p50": f"latency: p50 at {RATES[0]}/s, ms",
    "p50_of_many": f"latency: p50 at {RATES[1]}/s, ms",
    "relay": "RabbitMQ relay: messages/s",
    "relay_time": "RabbitMQ relay: processor time, µs",
    "consume": "RabbitMQ worker: messages/s",
    "consume_time": "RabbitMQ worker: processor time, µs",
    "over_rabbitmq": f"RabbitMQ latency: p50 at {rabbitmq.RATE}/s, ms",
    "inbox": "inbox: messages/s",
    "http": "HTTP relay: messages/s",
}


async def measure(database: Database, settings: Settings) -> Report:
    if settings.against is None:
        raise SystemExit("name the commit to compare with: --against COMMIT")
    with sources_of(settings.against) as sources, brokers.broker() as broker:
        versions = [Version(settings.against, sources, "before"), Version(NOW, ROOT / "src", NOW)]
        async with _surroundings(database) as port:
            found = await in_turns(
                versions, settings.rounds, lambda each: _speed(each, broker, database, port), lambda each: each.name
            )
    before, now = found[settings.against], found[NOW]
    return Report(
        f"Against {settings.against}",
        "Both versions in turns, everything else the same. The ratio is taken in each round.",
        ("", settings.against, NOW, "now to before"),
        [
            (what, median(values(before, name)), median(values(now, name)), spread(to_before(now, before, name)))
            for name, what in WHAT.items()
        ],
    )


def values(ones: Sequence[Speed], name: str) -> list[float]:
    return [getattr(one, name) for one in ones]


def to_before(now: Sequence[Speed], before: Sequence[Speed], name: str) -> list[float]:
    return ratios(values(now, name), values(before, name))


@contextmanager
def sources_of(commit: str) -> Iterator[Path]:
    packed = subprocess.run(  # noqa: S603 - a commit that whoever measures names
        ["git", "archive", commit, "src"],  # noqa: S607 - the git that made the checkout
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / "src"


@asynccontextmanager
async def _surroundings(database: Database) -> AsyncIterator[str]:
    """The table of the inbox's listener, and the port of a server that answers posts."""
    await inbox.make_effects(database)
    async with program((sys.executable, "-m", "bench.programs.sink"), {}) as sink:
        yield await sink.heard()


async def _speed(version: Version, broker: Broker, database: Database, port: str) -> Speed:
    ours = version.of(contenders.ours(database, f"{version.mark}_table"))
    drained = await drain(ours, database)
    late, late_of_many = [(await latency(ours, database, rate, rate * SECONDS)).p50 for rate in RATES]
    over = version.over(brokers.ours(broker, database, f"{version.mark}_over_rabbitmq", version.mark))
    relayed = await rabbitmq.relay(over, broker, database)
    consumed = await rabbitmq.consume(over, broker)
    carried = await rabbitmq.latency_of(over, broker, database)
    storing = version.over(inbox.ours(f"inbox-{version.mark}", "each", broker, database))
    stored = await rabbitmq.consume(storing, broker, inbox.MESSAGES)
    posted = await http_relay.relay(version.of(http_relay.ours(database, port, f"{version.mark}_over_http")), database)
    return Speed(
        drained.rate,
        drained.processor_time,
        late,
        late_of_many,
        relayed.rate,
        relayed.processor_time,
        consumed.rate,
        consumed.processor_time,
        carried.p50,
        stored.rate,
        posted.rate,
    )
