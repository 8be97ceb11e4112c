"""Checker: what histories and final tables say together. A pure function; it knows no process and no database."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from tests.chaos.evidence import Buried, Change, Effect, FinalTables, Place
from tests.chaos.fates import FATES, HANGING, MOST_ATTEMPTS, MOST_CRASHES, QUEUES
from tests.chaos.history import COMMITTED, ROLLED_BACK, UNKNOWN, UNTOLD, Emitted, History
from tests.chaos.order import ordering

RECOVERY = 10.0  # seconds within which work resumes once the faults are over
STOPPING = 20.0  # seconds within which a process that was told to stop is gone
ON_THE_WAY = 1.0  # seconds that a request may take from its relay to the doorway, or a write that was frozen
LONGEST_BATCH = 30.0  # seconds after which a relay knows what became of all that it sent at once
ENOUGH = 20  # dead letters of a kind, to tell what is an exception among them
TOLERANCE = 3  # a slow machine may take so many times as long

# Where a message may be isolated: its holder leases it under a second token, and under its own when it is started.
ISOLATED = ("poison",)

PLANNED_FAILURES = ("PlannedFailure", "TransactionError")


class Kind(StrEnum):
    """What can be wrong."""

    LOST = "lost"  # committed, and neither effect nor dead letter nor waiting
    STUCK = "stuck"  # still waiting after everything had time to end
    PHANTOM = "phantom"  # something of a message that was never committed
    MISROUTED = "misrouted"  # something in a queue that was not bound to the message
    REPEATED = "repeated"  # it ended more than once
    TORN = "torn"  # the producer's own row is not what the producer was told
    UNRESOLVED = "unresolved"  # nobody can tell whether a transaction committed
    ALTERED = "altered"  # delivered or buried otherwise than it was emitted
    DEAD = "dead"  # a dead letter that should have been none
    ALIVE = "alive"  # an effect where a dead letter was due
    REASON = "reason"  # a dead letter with a wrong reason
    SWALLOWED = "swallowed"  # an effect of an attempt that failed
    UNTRIED = "untried"  # an attempt was counted that nobody made
    RETRIES = "retries"  # more or fewer attempts than planned
    CRASHES = "crashes"  # tried again after it had killed enough workers, or buried before
    STOLEN = "stolen"  # a lease was taken that had not ended
    LATE = "late"  # written under a lease that had ended
    FOREIGN = "foreign"  # written under a lease that another process held
    UNHELD = "unheld"  # removed from its queue without a lease
    IDLE = "idle"  # no work was done after the last fault
    DESERTED = "deserted"  # a process ended that nobody had told to
    HUNG = "hung"  # a process did not end when it was told to, or had nothing more to do
    AGAIN = "again"  # tried again although its listener had committed
    BURNT = "burnt"  # an attempt was counted although the destination was away
    UNBALANCED = "unbalanced"  # services differ about the balance of an account
    OVERTAKEN = "overtaken"  # first delivered after something that was committed later


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    kind: Kind
    what: str  # the id of a message, a transaction's number, or the name of a process
    detail: str = ""
    queue: str = ""  # in which a message is lost


def check(history: History, tables: FinalTables) -> list[Violation]:
    """Every promise that was broken; empty is what we want."""
    facts = _Facts.of(history, tables)
    return [
        *_transactions(history, tables),
        *_ends(facts, tables.at_least_once),
        *_strangers(facts),
        *_effects(facts),
        *_dead_letters(facts, tables.at_least_once),
        *_own_commits(facts, history, tables.at_least_once),
        *_leases(history, tables),
        *_recovery(history, tables),
        *_outages(tables),
        *_processes(history),
        *_balances(tables),
        *_order(history, tables),
    ]


@dataclass
class _Facts:
    """Histories and tables, by message and queue."""

    committed: dict[str, Emitted] = field(default_factory=dict)
    effects: dict[Place, list[Effect]] = field(default_factory=lambda: defaultdict(list))
    buried: dict[Place, list[Buried]] = field(default_factory=lambda: defaultdict(list))
    waiting: Counter[Place] = field(default_factory=Counter)
    tried: dict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))
    runs: Counter[Place] = field(default_factory=Counter)

    @classmethod
    def of(cls, history: History, tables: FinalTables) -> _Facts:
        facts = cls()
        for transaction in history.transactions:
            if transaction.number in tables.orders:
                facts.committed.update((message.id, message) for message in transaction.messages)
        for effect in tables.effects:
            facts.effects[effect.message_id, effect.queue].append(effect)
        for letter in tables.dead_letters:
            facts.buried[letter.message.id, letter.queue].append(letter)
        facts.waiting.update(tables.waiting)
        for run in history.runs:
            place = run.message_id, run.queue
            facts.tried[place].add(run.attempt)
            facts.runs[place] += not run.failed
        return facts

    @property
    def expected(self) -> Iterator[tuple[Emitted, Place]]:
        """Every message that was committed, with each place where it must have ended."""
        for message in self.committed.values():
            for queue in QUEUES[message.routing_key]:
                yield message, (message.id, queue)


def _transactions(history: History, tables: FinalTables) -> Iterator[Violation]:
    """The producer's own row tells what became of a transaction, and must agree with what the producer was told."""
    for transaction in history.transactions:
        number, found = transaction.number, transaction.number in tables.orders
        if transaction.outcome == COMMITTED and not found:
            yield Violation(Kind.TORN, number, "the producer was told that it committed, and its row is not there")
        if transaction.outcome == ROLLED_BACK and found:
            yield Violation(Kind.TORN, number, "the producer was told that it rolled back, and its row is there")
        if transaction.outcome in (UNKNOWN, UNTOLD) and tables.open_sessions:
            yield Violation(Kind.UNRESOLVED, number, f"{tables.open_sessions} sessions are still open")


def _ends(facts: _Facts, at_least_once: bool) -> Iterator[Violation]:
    """Everything that was committed ended in each of its queues, and ended once."""
    for message, place in facts.expected:
        effects, letters = len(facts.effects.get(place, ())), len(facts.buried.get(place, ()))
        buried = min(letters, 1) if at_least_once else letters
        ends = effects + buried
        if FATES[message.fate].keeps:
            ends = max(effects, buried)  # the dead letter says that nothing more can be done about its effect
        unrouted = facts.waiting[message.id, ""]
        waiting = facts.waiting[place] + unrouted
        if waiting:
            yield Violation(Kind.STUCK, message.id, f"waits in {place[1] if not unrouted else 'no queue yet'}")
        if not ends and not waiting:
            yield Violation(Kind.LOST, message.id, f"{message.fate}, {place[1]}: no trace of it", place[1])
        if ends > 1 or (ends and waiting):
            yield Violation(
                Kind.REPEATED, message.id, f"{place[1]}: {effects} effects, {letters} dead letters, {waiting} waiting"
            )


def _strangers(facts: _Facts) -> Iterator[Violation]:
    """Nothing ended that was not committed, and nothing ended where it was not sent."""
    for what, places in (("effect", facts.effects), ("dead letter", facts.buried), ("row", facts.waiting)):
        for message_id, queue in places:
            message = facts.committed.get(message_id)
            if message is None:
                yield Violation(Kind.PHANTOM, message_id, f"{what} in {queue or 'no queue yet'}")
            elif queue and queue not in QUEUES[message.routing_key]:
                yield Violation(Kind.MISROUTED, message_id, f"{what} in {queue}")


def _effects(facts: _Facts) -> Iterator[Violation]:
    """An effect is of the message as it was emitted, and of an attempt that was made and did not fail."""
    for message, place in facts.expected:
        fate = FATES[message.fate]
        for effect in facts.effects.get(place, ()):
            if effect.digest != digest(message):
                yield Violation(Kind.ALTERED, message.id, f"{place[1]}: the listener saw something else")
            if fate.reason is not None and not fate.keeps:
                yield Violation(Kind.ALIVE, message.id, f"{place[1]}: {fate.name}, and yet it had an effect")
            elif effect.attempt <= fate.failures and not fate.keeps:
                yield Violation(Kind.SWALLOWED, message.id, f"{place[1]}: attempt {effect.attempt} {fate.name}")
            untried = set(range(1, effect.attempt + 1)) - facts.tried.get(place, set())
            if untried and fate.mistake not in HANGING:  # its time may be over before it is called
                yield Violation(Kind.UNTRIED, message.id, f"{place[1]}: attempts {sorted(untried)} were never made")


def _dead_letters(facts: _Facts, at_least_once: bool) -> Iterator[Violation]:
    """A dead letter is one that was meant to be, unchanged, for the right reason and after the right attempts."""
    for message, place in facts.expected:
        fate = FATES[message.fate]
        for letter in facts.buried.get(place, ()):
            if letter.message != message:
                yield Violation(Kind.ALTERED, message.id, f"{place[1]}: {_differences(letter.message, message)}")
            if fate.reason is None:
                yield Violation(Kind.DEAD, message.id, f"{place[1]}: {fate.name}, and yet it is dead: {letter.reason}")
            elif letter.reason != fate.reason:
                yield Violation(Kind.REASON, message.id, f"{place[1]}: {letter.reason} instead of {fate.reason}")
            elif letter.reason == "crashed":
                yield from _crashes(facts, place, letter, at_least_once)
            else:
                yield from _attempts(letter)


def _own_commits(facts: _Facts, history: History, at_least_once: bool) -> Iterator[Violation]:
    """What its listener has committed by itself is a dead letter at once: to try it again would repeat its effect.

    Where a broker delivers it again before that is done, because its worker died or no dead letter could be published,
    its entry in the inbox, which was committed too, ends it. That is so for some of them, and never for nearly all.
    """
    places = [place for message, place in facts.expected if FATES[message.fate].keeps]
    unburied = [place for place in places if facts.effects.get(place) and not facts.buried.get(place)]
    if not at_least_once or len(unburied) > max(ENOUGH, len(places)) * 0.75:
        for message_id, queue in unburied:
            yield Violation(Kind.ALIVE, message_id, f"{queue}: its listener committed by itself, and it counts as done")
    for place in places:
        if place in history.own_commits and max(facts.tried.get(place, {0})) > 1:
            yield Violation(Kind.AGAIN, place[0], f"{place[1]}: attempts {sorted(facts.tried[place])}")


def _crashes(facts: _Facts, place: Place, letter: Buried, at_least_once: bool) -> Iterator[Violation]:
    """It was run no more often than it may kill; a worker that died while it buried it counts, and ran nothing."""
    runs = facts.runs[place]
    if letter.crashes < MOST_CRASHES or (runs > MOST_CRASHES and not at_least_once):
        yield Violation(Kind.CRASHES, place[0], f"{place[1]}: {letter.crashes} crashes, {runs} runs")


def _attempts(letter: Buried) -> Iterator[Violation]:
    """The history has a line for every attempt, and the last planned failure was the last attempt."""
    lines = re.findall(r"attempt (\d+) (failed|was the last, \w+): (\w*)", letter.history)
    numbers = [int(number) for number, _, _ in lines]
    if numbers != list(range(1, letter.attempts + 1)):
        yield Violation(Kind.RETRIES, letter.message.id, f"{letter.attempts} attempts, and the history tells {numbers}")
    if letter.reason == "exhausted" and letter.attempts < MOST_ATTEMPTS:
        yield Violation(Kind.RETRIES, letter.message.id, f"given up after {letter.attempts} attempts")
    for number, end, error in lines:
        if end == "failed" and error in PLANNED_FAILURES and int(number) >= MOST_ATTEMPTS:
            yield Violation(Kind.RETRIES, letter.message.id, f"tried again after attempt {number}")


def _leases(history: History, tables: FinalTables) -> Iterator[Violation]:
    """A row under a lease is written by the lease's holder while it holds, and by nobody else before it ended.

    A statement looks at the lease after it began and before the row was changed. So a lease that had ended when it
    began must have stopped it, and one that had not ended when a claim was through must have kept the claim away.
    """
    holders: dict[str, str | None] = {}
    for change in tables.changes:
        held_by = change.old_token
        if change.new_token is not None and change.new_token not in holders:
            holders[change.new_token] = change.application
        if held_by is None or change.old_until is None:
            if change.deleted and change.queue:
                yield Violation(Kind.UNHELD, change.message_id, f"row {change.row} deleted by {change.application}")
            continue
        if change.new_token not in (None, held_by):
            own = holders.get(held_by) == change.application and change.queue in ISOLATED
            if change.old_until > change.at and not own:
                yield Violation(Kind.STOLEN, change.message_id, f"row {change.row} taken by {change.application}")
        elif change.old_until <= change.statement_at and not _held_the_row(history, change):
            yield Violation(Kind.LATE, change.message_id, f"row {change.row} written by {change.application}")
        elif holders.get(held_by) != change.application:
            holder = holders.get(held_by)
            yield Violation(Kind.FOREIGN, change.message_id, f"held by {holder}, written by {change.application}")


def _held_the_row(history: History, change: Change) -> bool:
    """Whether a transaction may have looked at the lease in time, and kept all others away until it wrote.

    SQLite knows no moment at which a transaction began to write. On servers the statement that changes a row looks at
    its lease.
    """
    if change.old_until is None or change.application is not None:
        return False
    ended, written = change.old_until.timestamp(), change.at.timestamp()
    frozen = [fault for fault in history.faults if fault.kind == "freeze"]
    return any(fault.began <= ended <= fault.ended and written <= fault.ended + ON_THE_WAY for fault in frozen)


def _recovery(history: History, tables: FinalTables) -> Iterator[Violation]:
    """Once the faults were over, work went on."""
    calm, longest = history.calm_since, RECOVERY * TOLERANCE
    if calm is None:
        return
    if not any(0 <= effect.at - calm <= longest for effect in tables.effects):
        yield Violation(Kind.IDLE, "everybody", f"nothing was done for {longest:.0f} s after the last fault")
    if tables.asked and not any(each.is_taken and 0 <= each.ended - calm <= longest for each in tables.asked):
        yield Violation(Kind.IDLE, "relays", f"nothing was taken over HTTP for {longest:.0f} s after the last fault")


def _outages(tables: FinalTables) -> Iterator[Violation]:
    """A relay counted no attempt but those that were refused, or not answered while others were.

    It tells the latter from an outage when the batch ends. An outage at which nobody listens leaves no request here, so
    nothing excuses an attempt that it burns.
    """
    if not tables.asked:
        return
    excused = excused_attempts(tables)
    for change in tables.changes:
        if change.deleted and not change.queue and change.attempts > excused[change.message_id]:
            detail = f"{change.attempts} attempts, of which {excused[change.message_id]} were refused or passed over"
            yield Violation(Kind.BURNT, change.message_id, detail)


def excused_attempts(tables: FinalTables) -> Counter[str]:
    """By message, how many attempts a relay may have counted at most."""
    answers: dict[str, list[float]] = defaultdict(list)
    for each in tables.asked:
        if each.status is not None:
            answers[each.relay].append(each.ended)
    excused: Counter[str] = Counter()
    for each in tables.asked:
        if each.status is None:
            # The relay's clock for a request began when it wrote it, a moment before it came here.
            later = answers[each.relay][bisect_left(answers[each.relay], each.began - ON_THE_WAY) :]
            excused[each.message_id] += bool(later) and later[0] <= each.ended + LONGEST_BATCH
        else:
            excused[each.message_id] += not each.is_taken
    return excused


def recovery_times(history: History, tables: FinalTables) -> list[tuple[str, float]]:
    """For each fault its kind, and the seconds from its end to the next effect."""
    effects = sorted(effect.at for effect in tables.effects)
    after = [(fault, bisect_left(effects, fault.ended)) for fault in history.faults]
    return [(fault.kind, effects[position] - fault.ended) for fault, position in after if position < len(effects)]


def _processes(history: History) -> Iterator[Violation]:
    """A process that was at work ends when it is told to, and not before."""
    for ending in history.endings:
        if ending.started and not ending.told:
            yield Violation(Kind.DESERTED, ending.process, f"it ended by itself with code {ending.code}")
        if ending.told and ending.seconds > STOPPING * TOLERANCE:
            yield Violation(Kind.HUNG, ending.process, f"it took {ending.seconds:.0f} s to stop")
    for number in sorted(history.children - history.ended):
        yield Violation(Kind.HUNG, number, "a forked process never came to its end")


def _balances(tables: FinalTables) -> Iterator[Violation]:
    """Every book says the same of an account, whatever service keeps it."""
    books = sorted({each.book for each in tables.balances})
    told = {(each.account, each.book): each.balance for each in tables.balances}
    for account in sorted({each.account for each in tables.balances}):
        balances = {book: told.get((account, book), 0) for book in books}
        if len(set(balances.values())) > 1:
            detail = ", ".join(f"{book} {balance}" for book, balance in balances.items())
            yield Violation(Kind.UNBALANCED, account, detail)


def _order(history: History, tables: FinalTables) -> Iterator[Violation]:
    """What the log brought was delivered in the order of its commits, copies of it not counted."""
    for late, early in ordering(history, tables).overtaken:
        yield Violation(Kind.OVERTAKEN, late, f"delivered after {early}, which was committed later")


def digest(message: Emitted) -> str:
    """What a listener can say of a message in a few letters, so that a changed one is seen."""
    told = [message.id, message.routing_key, message.key, sorted(message.headers.items()), message.content_type]
    return sha256(repr(told).encode() + message.body).hexdigest()[:16]


def _differences(found: Emitted, emitted: Emitted) -> str:
    before, after = vars(emitted), vars(found)
    changed = [name for name in before if name != "fate" and before[name] != after[name]]
    return ", ".join(f"{name} is {after[name]!r}, was {before[name]!r}" for name in changed)


def count(violations: list[Violation]) -> Mapping[Kind, int]:
    """How many of each kind."""
    return Counter(violation.kind for violation in violations)
