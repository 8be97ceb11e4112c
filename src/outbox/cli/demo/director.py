"""The director: puts the shop through a bad day and keeps count of what was done to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from outbox.cli.demo import shop
from outbox.cli.demo.ledger import LISTENERS, Plan, Witness
from outbox.cli.demo.shop import CardDeclined, Order
from outbox.cli.demo.stage import Stage
from outbox.cli.demo.worker import DemoWorker, Run
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.words import count, first_line

LEASE = 4.0  # seconds after which a dead worker's messages come back; in earnest it would be longer

TOWNS = ["Bergen", "Gdansk", "Porto", "Trieste"]
UNKNOWN_TOWN = "Atlantis"

BEFORE, MEANWHILE, AFTER = range(1, 31), range(31, 51), range(51, 61)  # orders: before, during and after the kill
BIG_ORDER = 12
BIG = 150  # crates: packing them takes longer than a busy machine needs to notice it and kill the worker
ROLLED_BACK, SLOW = 9, 4

PATIENCE = 60.0  # seconds after which something must be wrong
LOOK_EVERY = 0.03


class Director:
    """Plays the demo once."""

    def __init__(self, file: Path, seed: int, stage: Stage) -> None:
        self._stage = stage
        self._witness = Witness(file)
        self._orders = {order.id: order for order in invent_orders(seed)}
        self._placed: set[int] = set()
        self._rolled_back: set[int] = set()
        self._runs: list[Run] = []
        self._replayed = 0
        self._worker: DemoWorker | None = None

    async def play(self) -> Plan:
        """The whole story, in order."""
        with closing(self._witness):
            try:
                await self._open()
                await self._take_orders(BEFORE, "no worker runs yet: their messages wait")
                await self._kill_a_worker()
                await self._take_orders(MEANWHILE, "the shop does not miss its worker")
                await self._replace_the_worker()
                await self._take_orders(AFTER, "taken while the new worker is at work")
                await self._bury_and_replay()
                await self._finish()
            finally:
                if self._worker is not None:
                    await self._worker.kill()
                await shop.outbox.close()
        slow = {id for id in self._placed if self._orders[id].card == "slow"}
        return Plan(
            placed=frozenset(self._placed),
            rolled_back=frozenset(self._rolled_back),
            slow=frozenset(slow),
            runs=len(self._runs),
            replayed=self._replayed,
        )

    async def _open(self) -> None:
        await shop.open_shop(TOWNS)
        committed = sum(order.card != "declined" for order in self._orders.values())
        self._stage.expect({"orders": committed} | dict.fromkeys(LISTENERS, committed))

    async def _take_orders(self, ids: Iterable[int], remark: str) -> None:
        placed = rolled_back = 0
        for id in ids:
            try:
                await shop.place(self._orders[id])
            except CardDeclined:
                self._rolled_back.add(id)
                rolled_back += 1
            else:
                self._placed.add(id)
                placed += 1
            self._show_progress()
        self._stage.say(f"{count(placed, 'order')} placed, {rolled_back} rolled back; {remark}")

    async def _start_a_worker(self) -> DemoWorker:
        self._worker = await DemoWorker.start()
        self._stage.say(f"worker {self._worker.pid} starts")
        return self._worker

    async def _kill_a_worker(self) -> None:
        worker = await self._start_a_worker()
        await self._until(lambda: ("warehouse", BIG_ORDER) in worker.runs, "the big order was not packed")
        await worker.kill()
        self._end_of(worker)
        held = count(self._witness.leased(), "message")
        self._stage.say(f"worker {worker.pid} gets SIGKILL while it packs order {BIG_ORDER}; it held {held}")
        self._stage.say(f"they come back when its lease of {LEASE:g}s ends; its open transaction is undone")

    async def _replace_the_worker(self) -> None:
        worker = await self._start_a_worker()
        await self._until(lambda: bool(worker.runs), "the new worker did nothing")

    async def _bury_and_replay(self) -> None:
        """The courier cannot find a town. Once the reason is gone, the message is tried again."""
        await self._until(lambda: self._witness.dead_letters() > 0, "no message died")
        [letter] = await shop.outbox.dead_letters.list()
        why = first_line(letter.error).partition(": ")[2]
        self._stage.say(f"dead letter {letter.id} in {letter.queue}, {letter.reason}: {why}")
        await shop.learn_the_way_to(UNKNOWN_TOWN)
        self._replayed = await shop.outbox.dead_letters.replay([letter.id])
        self._stage.say(f"the way to {UNKNOWN_TOWN} is found, and dead letter {letter.id} replayed")

    async def _finish(self) -> None:
        everything = len(self._placed) * len(LISTENERS)
        await self._until(lambda: sum(self._witness.effects().values()) >= everything, "not everything was handled")
        await self._until(lambda: not self._witness.open_messages(), "not everything was settled")
        worker = self._worker
        assert worker is not None  # noqa: S101 - started above
        code = await worker.stop()
        self._end_of(worker)
        self._stage.say(f"all is handled; worker {worker.pid} stopped (SIGTERM), its exit code is {code}")

    def _end_of(self, worker: DemoWorker) -> None:
        self._runs += worker.runs
        self._worker = None

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Look at the file again and again; a worker that ends by itself is a reason to stop."""
        deadline = self._stage.seconds + PATIENCE
        while not condition():
            self._show_progress()
            worker = self._worker
            if worker is not None and worker.has_ended:
                raise Failure(ExitCode.WRONG, f"worker {worker.pid} ended by itself: {worker.last_words}")
            if self._stage.seconds > deadline:
                raise Failure(ExitCode.WRONG, f"{otherwise} within {PATIENCE:g} seconds")
            await asyncio.sleep(LOOK_EVERY)
        self._show_progress()

    def _show_progress(self) -> None:
        self._stage.update({"orders": len(self._placed)} | self._witness.effects())


def invent_orders(seed: int) -> list[Order]:
    """Orders with a fate each, by chance, and the same chance for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - a story, not a secret
    ids = [*BEFORE, *MEANWHILE, *AFTER]
    others = [id for id in ids if id != BIG_ORDER]
    fates = chance.sample(others, ROLLED_BACK + SLOW + 1)
    declined, slow, lost = set(fates[:ROLLED_BACK]), set(fates[ROLLED_BACK:-1]), fates[-1]
    return [
        Order(
            id=id,
            town=UNKNOWN_TOWN if id == lost else chance.choice(TOWNS),
            crates=BIG if id == BIG_ORDER else 1,
            card="declined" if id in declined else "slow" if id in slow else "good",
        )
        for id in ids
    ]
