"""Run: one seed from the first process to the verdict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from tests.chaos import history
from tests.chaos.application import Application
from tests.chaos.failovers import judge
from tests.chaos.faults import Faults, Missed
from tests.chaos.history import Historian
from tests.chaos.processes import PRODUCER, RELAY, WORKER, Crew, Home, Member
from tests.chaos.profiles import Profile
from tests.chaos.report import Report
from tests.chaos.schedule import Planned, schedule
from tests.chaos.surroundings import Surroundings

Say = Callable[[str], None]

STARTING = 60.0  # seconds for all processes to be at work
PATIENCE = 60.0  # seconds that a fault waits for work to be done since the last one
PACE = 0.8  # of the messages that are emitted until a fault have their effects before it strikes
LOOK_EVERY = 0.2  # seconds


def run(profile: Profile, seed: int, say: Say = lambda _: None) -> Report:
    """Torment the library, then check what it promised. The folder stays if something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"outbox-chaos-{seed}-"))
    for name in ("histories", "logs", "killed", "children"):
        (folder / name).mkdir()
    began = time.monotonic()
    with Application(profile.services, profile.disk, profile.accounts, profile.broker) as application:
        rig = _Rig(profile, seed, folder, application, say)
        asyncio.run(rig.run())
        told, tables = history.read(folder / "histories"), application.final_tables()
    say("checking")
    verdict = judge(told, tables)
    seconds = time.monotonic() - began
    report = Report(profile, seed, folder, seconds, told, tables, verdict, rig.missed, rig.skipped)
    if report.violations:
        (folder / "violations.txt").write_text("\n".join(report.evidence()) + "\n")
    else:
        shutil.rmtree(folder)
    return report


class _Rig:
    """Starts everything, lets the faults strike, and waits until nothing moves any more."""

    def __init__(self, profile: Profile, seed: int, folder: Path, application: Application, say: Say) -> None:
        self._profile = profile
        self._seed = seed
        self._folder = folder
        self._application = application
        self._say = say
        self._history = Historian(folder / "histories" / "rig.jsonl")
        self._here = Surroundings(
            name="rig",
            folder=folder,
            seed=seed,
            slow=profile.slow,
            slow_share=profile.slow_share,
            kills=profile.kills,
            mistakes=profile.mistakes,
            rate=profile.rate,
            accounts=profile.accounts,
        )
        self._crew = Crew(list(self._members()))
        self._faults = Faults(self._crew, application)
        self.missed: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}

    async def run(self) -> None:
        self._background = [
            asyncio.create_task(each) for each in (self._crew.tend(), self._hold_back(), self._witness())
        ]
        try:
            await self._torment()
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)
            self._crew.kill()

    async def _torment(self) -> None:
        if not await self._until(self._crew.is_at_work, STARTING):
            raise RuntimeError(f"not everybody is at work after {STARTING:g} s: see {self._folder / 'logs'}")
        self._say("everybody is at work")
        await self._strike()
        self._say("the faults are over")
        self._application.answer_everything()
        await self._until(self._crew.is_at_work, STARTING)
        calm_since = time.time()
        self._history.note("calm")
        emitted = await self._while_it_moves(self._application.emitted, lambda count: count >= self._profile.messages)
        await self._until(lambda: self._application.effects(calm_since) > 0, self._profile.patience)
        await self._crew.retire(PRODUCER)
        self._say(f"{emitted} messages are emitted, and no more will be")
        waiting = await self._while_it_moves(self._application.waiting, lambda count: not count)
        self._say(f"{waiting} messages wait")
        await self._crew.retire(RELAY, WORKER)
        await self._until(lambda: not self._application.open_sessions(), STARTING)
        await self._until(lambda: not any(self._here.children.iterdir()), STARTING)

    async def _strike(self) -> None:
        """Let every fault of the schedule strike at its moment, whatever the others are doing.

        A slow machine gets more time: without work in between, faults would strike nothing but starting processes.
        """
        began = time.monotonic()
        striking = []
        faults = self._planned()
        for position, fault in enumerate(faults):
            await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
            work = PACE * self._profile.messages * position / len(faults)
            await self._until(lambda: self._application.effects() >= work, PATIENCE)  # noqa: B023
            striking.append(asyncio.create_task(self._struck(fault)))
        await asyncio.gather(*striking)

    def _planned(self) -> list[Planned]:
        profile = self._profile
        kinds = list(profile.kinds)
        reason = self._application.why_no_disk_can_be_full()
        if reason and "full disk" in kinds:
            kinds.remove("full disk")
            self.skipped["full disk"] = reason
            self._say(f"skipped: full disk: {reason}")
        return schedule(self._seed, kinds, profile.faults, profile.seconds, profile.lease, profile.targets)

    async def _struck(self, fault: Planned) -> None:
        began = time.time()
        try:
            await self._faults.strike(fault)
        except Missed:
            self.missed[fault.kind] += 1
            return
        self._history.note("fault", kind=fault.kind, target=fault.target, began=began, ended=time.time())
        self._say(f"{fault.kind}: {fault.target}, {time.time() - began:.1f} s")

    async def _hold_back(self) -> None:
        """Tell producers when workers do not keep up: faults shall meet work, not a mountain of it."""
        while True:
            with suppress(SQLAlchemyError):  # the database is away, by a fault that goes on
                too_much = await asyncio.to_thread(self._application.waiting) > self._profile.backlog
                if too_much:
                    self._here.enough.touch()
                else:
                    self._here.enough.unlink(missing_ok=True)
            await asyncio.sleep(1.0)

    async def _witness(self) -> None:
        """Note the order of commits now and then, so that no server has to keep it for long."""
        while True:
            with suppress(SQLAlchemyError):
                await asyncio.to_thread(self._application.witness)
            await asyncio.sleep(1.0)

    async def _until(self, condition: Callable[[], bool], longest: float) -> bool:
        """Wait for it, and say whether it came about; what did not is for the checker to tell."""
        deadline = time.monotonic() + longest
        while not await asyncio.to_thread(condition):
            if time.monotonic() > deadline:
                return False
            await self._pause()
        return True

    async def _while_it_moves(self, look: Callable[[], int], enough: Callable[[int], bool]) -> int:
        """Look until it is enough, or nothing has changed for too long; what was seen last."""
        seen, since = await asyncio.to_thread(look), time.monotonic()
        while not enough(seen) and time.monotonic() - since < self._profile.patience:
            await self._pause()
            now = await asyncio.to_thread(look)
            if now != seen:
                seen, since = now, time.monotonic()
        return seen

    async def _pause(self) -> None:
        for task in self._background:
            if task.done():
                task.result()
        await asyncio.sleep(LOOK_EVERY)

    def _members(self) -> Iterator[Member]:
        """Those of every service; a name is one in all of them."""
        numbers: dict[str, Iterator[int]] = defaultdict(count)
        for service, home in zip(self._profile.services, self._application.homes, strict=True):
            for role, many in service.members.items():
                for _ in range(many):
                    yield self._member(role, next(numbers[role]), home)

    def _member(self, role: str, number: int, home: Home) -> Member:
        options = {
            "OUTBOX_LEASE": f"{self._profile.lease}s",
            "OUTBOX_POLL_INTERVAL": f"{self._profile.poll_interval}s",
            "OUTBOX_GRACE": "5s",
            "OUTBOX_PREFETCH_COUNT": "100",
        }
        return Member(role, number, home, options, self._here, self._history)
