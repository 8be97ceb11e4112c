"""Producer: commits rows of its own together with messages, and tells before and after what it did.

    python -m tests.chaos.producer async|sync

`intends` is on disk before a transaction may commit, and `ended` after it did: committed, rolled back, or unknown if
the connection was lost while it committed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session

import outbox.sqlite
from outbox import Message, Outbox, TransactionError
from outbox.adapters import sync_url
from tests.chaos.children import fork
from tests.chaos.fates import FATES, FORKS, ORDERS, QUEUES, SWALLOWS, SWITCHED_OFF, Fate, choose
from tests.chaos.history import COMMITTED, ROLLED_BACK, UNKNOWN, Emitted
from tests.chaos.mistakes import swallow
from tests.chaos.surroundings import Surroundings, historian
from tests.chaos.tables import ORDERED, account, added, orders

PAUSE = 0.2  # seconds after an error
HOLD_BACK = 1.0  # seconds between two transactions while too much waits
ROLLBACKS, SAVEPOINTS, LARGE = 0.15, 0.1, 0.01  # of all transactions, transactions, bodies
MOST = 100  # of an amount
SWALLOW_FIRST, SWALLOW_LAST, FORK = "swallow first", "swallow last", "fork"
_MISTAKES = {SWALLOW_FIRST: SWALLOWS, SWALLOW_LAST: SWALLOWS, FORK: FORKS}  # with a transaction of the library's own

logger = logging.getLogger("chaos")


@dataclass(frozen=True)
class Plan:
    """One transaction, before it is tried: bodies by routing key."""

    number: str
    bodies: dict[str, list[tuple[Fate, Any]]]
    size: int
    account: str  # whose orders these are; empty where nobody keeps balances
    commits: bool
    savepoint: bool  # emits one more message, in a savepoint that is rolled back
    mistake: str  # what is done wrong, if anything

    @property
    def amount(self) -> int:
        """What is added to the account: as much as each queue will add that handles a message."""
        return sum(
            len(QUEUES[routing_key]) * body["amount"]
            for routing_key, bodies in self.bodies.items()
            for fate, body in bodies
            if fate.reason is None
        )


def plans(here: Surroundings) -> Iterator[Plan]:
    """The same for the same seed and name."""
    chance = random.Random(f"{here.seed} {here.name}")
    number = 0
    while True:
        number += 1
        size = chance.choice([1, 1, 1, 2, 3, 5, 10, 30])
        whose = account(number % here.accounts) if here.accounts else ""
        bodies = defaultdict(list)
        for position in range(size):
            fate, routing_key = choose(chance, here.kills, here.slow_share, here.mistakes)
            body = _body(chance, fate, f"{here.name} {number} {position}")
            if here.accounts and isinstance(body, dict):
                counts = routing_key in ORDERS  # what goes elsewhere is not for the books
                body |= {"account": whose, "amount": (1 + (number + position) % MOST) if counts else 0}
            bodies[routing_key].append((fate, body))
        commits, savepoint = chance.random() >= ROLLBACKS, chance.random() < SAVEPOINTS
        mistake = chance.choice(list(_MISTAKES)) if chance.random() < here.mistakes else ""
        if _MISTAKES.get(mistake) in SWITCHED_OFF:
            mistake = ""
        yield Plan(f"{here.name} {number}", dict(bodies), size, whose, commits, savepoint, mistake)


def _body(chance: random.Random, fate: Fate, name: str) -> object:
    if fate.reason == "undecodable":
        return b"\x00\xff" + chance.randbytes(20)
    padding = "ü" * (20_000 if chance.random() < LARGE else chance.randrange(50))
    return {"fate": fate.name, "name": name, "padding": padding}


class PlannedRollback(Exception):
    """The transaction was meant to be rolled back."""


@dataclass
class Attempt:
    """A transaction that is being tried."""

    plan: Plan
    outcome: str = ROLLED_BACK  # as long as nobody tried to commit
    emitted: list[Emitted] = field(default_factory=list)
    taken_back: list[str] = field(default_factory=list)

    def add(self, messages: list[Message], fates: list[Fate]) -> None:
        for message, fate in zip(messages, fates, strict=True):
            self.emitted.append(Emitted.of(message, fate.name))

    def ready(self) -> None:
        """The last word before the transaction ends, one way or the other."""
        historian().note(
            "intends",
            number=self.plan.number,
            messages=[message.as_facts() for message in self.emitted],
            taken_back=self.taken_back,
        )
        if not self.plan.commits:
            raise PlannedRollback
        self.outcome = UNKNOWN

    def committed(self) -> None:
        self.outcome = COMMITTED


class Producer:
    """Tries one plan after another, at its rate, until it is told to stop."""

    def __init__(self, here: Surroundings, its_outbox: Outbox) -> None:
        self._here = here
        self._outbox = its_outbox
        self._stopping = False
        self._due = time.monotonic()

    async def produce(self) -> None:
        """With an event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        for plan in self._plans():
            await self._try(plan)
            await asyncio.sleep(self._pause_after(plan))
        await self._outbox.close()

    def produce_now(self) -> None:
        """Without one."""
        signal.signal(signal.SIGTERM, self._stop)
        engine = create_engine(sync_url(self._outbox.engines.main.url), pool_pre_ping=True)
        if engine.dialect.name == "sqlite":
            outbox.sqlite.prepare(engine)
        for plan in self._plans():
            with self._attempted(plan) as attempt:
                with Session(engine) as session, session.begin():
                    self._write_now(session, attempt)
                    attempt.ready()
                attempt.committed()
            time.sleep(self._pause_after(plan))

    async def _try(self, plan: Plan) -> None:
        if plan.mistake == FORK:
            fork(self._outbox)
        with self._attempted(plan) as attempt:
            async with self._outbox.transaction() as session:
                await session.execute(insert(orders).values(number=plan.number, messages=plan.size))
                if plan.mistake == SWALLOW_FIRST:
                    await swallow(session)
                for routing_key, bodies in plan.bodies.items():
                    fates, contents = zip(*bodies, strict=True)
                    headers = {"number": plan.number.replace(" ", "-")}
                    messages = await self._outbox.emit_many(
                        session, routing_key, contents, key=plan.number, headers=headers
                    )
                    attempt.add(messages, list(fates))
                if plan.savepoint:
                    savepoint = await session.begin_nested()
                    message = await self._outbox.emit(session, "order.placed", {"fate": FATES["fine"].name})
                    attempt.taken_back.append(message.id)
                    await savepoint.rollback()
                if plan.account:
                    await session.execute(added(ORDERED, plan.account, plan.amount))
                if plan.mistake == SWALLOW_LAST:
                    await swallow(session)
                attempt.ready()
            attempt.committed()

    def _write_now(self, session: Session, attempt: Attempt) -> None:
        plan = attempt.plan
        session.execute(insert(orders).values(number=plan.number, messages=plan.size))
        for routing_key, bodies in plan.bodies.items():
            for fate, body in bodies:
                message = self._outbox.emit_sync(session, routing_key, body, headers={"umlaut": "größer"})
                attempt.add([message], [fate])
        if plan.savepoint:
            savepoint = session.begin_nested()
            message = self._outbox.emit_sync(session, "order.placed", {"fate": FATES["fine"].name})
            attempt.taken_back.append(message.id)
            savepoint.rollback()
        if plan.account:
            session.execute(added(ORDERED, plan.account, plan.amount))

    @contextmanager
    def _attempted(self, plan: Plan) -> Iterator[Attempt]:
        attempt = Attempt(plan)
        try:
            yield attempt
        except PlannedRollback:
            pass
        except TransactionError as refusal:
            attempt.outcome = ROLLED_BACK  # that is what it says, whenever it comes
            logger.warning("refused: %s", refusal)
        except Exception as error:  # noqa: BLE001 - drivers throw what they like
            logger.warning("%s: %s", attempt.outcome, " ".join(str(error).split())[:300] or type(error).__name__)
            time.sleep(PAUSE)
        historian().note("ended", number=plan.number, outcome=attempt.outcome)

    def _plans(self) -> Iterator[Plan]:
        for plan in plans(self._here):
            if self._stopping:
                return
            yield plan

    def _pause_after(self, plan: Plan) -> float:
        """Seconds to wait to keep the rate; what was missed by more than one is not made up for."""
        if self._here.enough.exists():
            return HOLD_BACK
        now = time.monotonic()
        self._due = max(self._due + plan.size / self._here.rate, now - 1.0)
        return max(0.0, self._due - now)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def main(way: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    producer = Producer(Surroundings.here(), Outbox())
    logger.info("producer started")
    if way == "async":
        asyncio.run(producer.produce())
    else:
        producer.produce_now()


if __name__ == "__main__":
    main(sys.argv[1])
