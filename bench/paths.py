"""Fast paths: what each of them buys, by what is lost without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench import broker as brokers
from bench import contenders
from bench.broker import Broker
from bench.contenders import Contender
from bench.database import Database
from bench.drain import drain
from bench.latency import latency
from bench.rabbitmq import relay
from bench.report import Report, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios
from bench.without import PATHS

ALL = "with all of them"
RATES = {200: 1_000, 500: 2_500}  # messages a second, and messages
PROGRAM = (sys.executable, "-m", "bench.programs.without")


@dataclass(frozen=True)
class Speed:
    """Without some path."""

    drained: float  # messages a second
    processor_time: float  # of the worker, µs for each
    p50: Sequence[float]  # milliseconds, at each of the rates
    relayed: float  # messages a second over RabbitMQ

    def __str__(self) -> str:
        late = ", ".join(map(number, self.p50))
        drained = f"drain {number(self.drained)}/s ({number(self.processor_time)} µs)"
        return f"{drained}, p50 {late} ms, relay {number(self.relayed)}/s"


async def measure(database: Database, settings: Settings) -> Report:
    without = {ALL: "", **{f"without {path}": path for path in PATHS}}
    with brokers.broker() as broker:
        found = await in_turns(
            list(without), settings.rounds, lambda each: _speed(without[each], broker, database), lambda each: each
        )
    base = found[ALL]
    return Report(
        "Fast paths",
        "Each of them switched off alone, from outside. Ratios are to the run with all of them in the same round: "
        "rates below 1 and latencies above 1 are what the path buys.",
        ("", "drain", "processor time", "p50 at 200/s", "p50 at 500/s", "relay over RabbitMQ"),
        [
            (
                name,
                _to([one.drained for one in ones], [one.drained for one in base]),
                _to([one.processor_time for one in ones], [one.processor_time for one in base]),
                *(_to([one.p50[rate] for one in ones], [one.p50[rate] for one in base]) for rate in range(len(RATES))),
                _to([one.relayed for one in ones], [one.relayed for one in base]),
            )
            for name, ones in found.items()
        ],
    )


async def _speed(path: str, broker: Broker, database: Database) -> Speed:
    contender = _without(contenders.ours(database), path)
    drained = await drain(contender, database)
    late = [(await latency(contender, database, rate, count)).p50 for rate, count in RATES.items()]
    over = brokers.ours(broker, database)
    over = replace(over, relay=_program(over.relay), environment={**over.environment, "BENCH_WITHOUT": path})
    relayed = await relay(over, broker, database)
    return Speed(drained.rate, drained.processor_time, late, relayed.rate)


def _without(contender: Contender, path: str) -> Contender:
    environment = {**contender.environment, "BENCH_WITHOUT": path}
    return replace(contender, worker=_program(contender.worker), emitter=(*PROGRAM, "emitter"), environment=environment)


def _program(command: Sequence[str]) -> tuple[str, ...]:
    """`python -m outbox …`, by way of the program that switches paths off."""
    return (*PROGRAM, *command[3:])


def _to(these: Sequence[float], those: Sequence[float]) -> str:
    return spread(ratios(these, those))
