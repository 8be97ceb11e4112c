"""Report: a run in one table, and what is known about everything that went wrong."""

from __future__ import annotations

import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import checker, failovers
from tests.chaos.checker import Kind, Violation
from tests.chaos.evidence import FinalTables
from tests.chaos.failovers import Verdict
from tests.chaos.fates import FATES
from tests.chaos.history import History
from tests.chaos.order import ordering
from tests.chaos.profiles import Profile

MOST_SHOWN, MOST_EXPLAINED = 20, 100  # violations


@dataclass
class Report:
    """What a run did, and what was wrong."""

    profile: Profile
    seed: int
    folder: Path
    seconds: float
    history: History
    tables: FinalTables
    verdict: Verdict
    missed: Counter[str]
    skipped: dict[str, str] = field(default_factory=dict)  # kinds of faults that this machine cannot have, and why

    @property
    def violations(self) -> list[Violation]:
        return self.verdict.violations

    @property
    def messages(self) -> int:
        """How many were committed."""
        return sum(len(each.messages) for each in self.history.transactions if each.number in self.tables.orders)

    def lines(self) -> list[str]:
        """The table."""
        return [
            f"{self.profile.name}, seed {self.seed}, {self.seconds:.0f} s",
            "",
            *self._faults(),
            "",
            *self._messages(),
            "",
            *self._mistakes(),
            "",
            *self._leaders(),
            *self._fail_overs(),
            f"  violations           {len(self.violations):>9}",
            *(f"    {kind:19}{count:>9}" for kind, count in checker.count(self.violations).items()),
            *(f"    {each.kind}: {each.what}: {each.detail}" for each in self.violations[:MOST_SHOWN]),
        ]

    def _faults(self) -> Iterator[str]:
        """By kind: how many, and how long it took from their end to the next effect."""
        times: dict[str, list[float]] = defaultdict(list)
        for kind, seconds in checker.recovery_times(self.history, self.tables):
            times[kind].append(seconds)
            times["all"].append(seconds)
        struck = Counter(fault.kind for fault in self.history.faults)
        yield f"  {'fault':26}{'struck':>8}{'missed':>8}   next effect after, median and longest"
        for kind in (*self.profile.kinds, "all"):
            count, missed = (
                (struck[kind], self.missed[kind]) if kind != "all" else (struck.total(), self.missed.total())
            )
            took = f"{statistics.median(times[kind]):>7.2f} s{max(times[kind]):>8.2f} s" if times[kind] else ""
            yield f"  {kind:26}{count:>8}{missed or '':>8}   {took}".rstrip()
        for kind, reason in self.skipped.items():
            yield f"  skipped: {kind}: {reason}"

    def _messages(self) -> Iterator[str]:
        outcomes = Counter(each.outcome for each in self.history.transactions)
        killed = sum(ending.code == -signal.SIGKILL for ending in self.history.endings)
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        yield f"  messages committed   {self.messages:>9}"
        yield f"  effects              {len(self.tables.effects):>9}"
        yield f"  dead letters         {len(self.tables.dead_letters):>9}"
        yield f"  transactions         {outcomes.total():>9}   {told}"
        yield f"  runs of listeners    {sum(not run.failed for run in self.history.runs):>9}"
        yield f"  audited writes       {len(self.tables.changes):>9}"
        if asked := self.tables.asked:
            refused = sum(each.status is not None and not each.is_taken for each in asked)
            silent = sum(each.status is None for each in asked)
            burnt = sum(each.attempts for each in self.tables.changes if each.deleted and not each.queue)
            yield f"  requests over HTTP   {len(asked):>9}   {refused} refused, {silent} without an answer"
            yield f"  attempts that failed {burnt:>9}"
        if balances := self.tables.balances:
            accounts = {each.account for each in balances}
            yield f"  balances compared    {len(balances):>9}   of {len(accounts)} accounts"
        if self.tables.commits:
            found = ordering(self.history, self.tables)
            yield f"  in order of commits  {found.compared:>9}   {found.left} were left to the table"
        yield f"  processes that ended {len(self.history.endings):>9}   {killed} killed"

    def _leaders(self) -> Iterator[str]:
        """How long everything stood still when the leader of a queue was killed."""
        stood = failovers.pauses(self.history, self.tables, "kill the leader")
        if stood:
            longest = f"{statistics.median(stood):.1f} s without an effect, {max(stood):.1f} s at most"
            yield f"  leaders killed       {len(stood):>9}   {longest}"
            yield ""

    def _fail_overs(self) -> Iterator[str]:
        """What standbys did not have when they took over, and what followed from it."""
        fail_overs = self.tables.fail_overs
        if not fail_overs:
            return
        took = failovers.outages(self.tables)
        orders = sum(len(each.vanished_orders) for each in fail_overs)
        effects = sum(len(each.vanished_effects) for each in fail_overs)
        told = failovers.told_and_vanished(self.history, self.tables)
        outage = f"   {statistics.median(took):.1f} s to the next effect, {max(took):.1f} s at most" if took else ""
        yield f"  failovers            {len(fail_overs):>9}{outage}"
        yield f"  vanished orders      {orders:>9}   {told} of which a producer knew to be committed"
        yield f"  vanished effects     {effects:>9}"
        for kind, what in (
            (Kind.TORN, "orders gone"),
            (Kind.PHANTOM, "handled without order"),
            (Kind.LOST, "lost messages"),
        ):
            found = {(each.what, each.queue) for each in self.verdict.forgotten if each.kind == kind}
            yield f"  {what:21}{len(found):>9}   by a standby that was behind"
        yield ""

    def _mistakes(self) -> Iterator[str]:
        """By kind: with how many messages it was made, and how these ended in their queues."""
        fates = {
            message.id: FATES[message.fate]
            for each in self.history.transactions
            if each.number in self.tables.orders
            for message in each.messages
        }
        ends = {
            "effects": Counter(
                fates[each.message_id].mistake for each in self.tables.effects if each.message_id in fates
            ),
            "dead letters": Counter(
                fates[each.message.id].mistake for each in self.tables.dead_letters if each.message.id in fates
            ),
        }
        made = Counter(fate.mistake for fate in fates.values())
        yield f"  {'mistake':26}{'messages':>9}" + "".join(f"{name:>14}" for name in ends)
        for mistake in dict.fromkeys(fate.mistake for fate in FATES.values() if fate.mistake):
            counts = "".join(f"{counted[mistake]:>14}" for counted in ends.values())
            yield f"  {mistake:26}{made[mistake]:>9}{counts}"
        committed = len(self.history.children & self.tables.orders)
        yield f"  {'forked processes':26}{len(self.history.children):>9}   {committed} committed"

    def evidence(self) -> Iterator[str]:
        """For each violation, everything that histories and tables say about its message."""
        for violation in self.violations[:MOST_EXPLAINED]:
            yield f"{violation.kind}: {violation.what}: {violation.detail}"
            for transaction in self.history.transactions:
                if violation.what in (transaction.number, *(message.id for message in transaction.messages)):
                    yield f"    {transaction.number}: {transaction.outcome}"
            for run in self.history.runs:
                if run.message_id == violation.what:
                    yield f"    {run}"
            for effect in self.tables.effects:
                if effect.message_id == violation.what:
                    yield f"    {effect}"
            for letter in self.tables.dead_letters:
                if letter.message.id == violation.what:
                    yield f"    {letter}"
            for change in self.tables.changes:
                if change.message_id == violation.what:
                    yield f"    {change}"
