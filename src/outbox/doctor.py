"""Doctor: looks at everything that is known to go wrong, and says what to do about it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

from sqlalchemy.exc import DBAPIError

from outbox.adapters import installed_drivers
from outbox.core.binding import Binding
from outbox.core.diagnosis import Claimable, Examination, Finding, Level, dead_letter_findings, place_of
from outbox.core.durations import in_words
from outbox.core.listener import Listener
from outbox.core.printing import in_bytes
from outbox.core.store import IN_DATABASE, Backlog, Difference, StoredMessage
from outbox.core.transport import countable
from outbox.instance import Outbox
from outbox.owners import recorded_queues
from outbox.rebinding import Rebinding, further_keys

LARGEST_SKEW = timedelta(seconds=1)  # of the clocks; more is seen in the times that an `eta` names
PATIENCE = timedelta(minutes=1)  # what is due for longer should have been claimed; at least ten poll intervals
MUCH_LOG = 1024**3  # bytes that a slot may hold back before it is said
ROUTING_KEYS = 3  # so many are named

_REFUSED = "42501"  # PostgreSQL's word for a right that is missing


async def examine(outbox: Outbox, listeners: Sequence[Listener] = (), *, management_url: str = "") -> list[Finding]:
    """Everything that can be said of an outbox, and of its broker beside what these listeners need."""
    findings, recorded = await _database(outbox, listeners)
    return [*findings, *await _broker(outbox, listeners, recorded, management_url)]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What workers have recorded in the database."""

    queues: Collection[str] = ()
    stale: Collection[Binding] | None = None  # bindings that no listener asks for; None: not recorded


async def _database(outbox: Outbox, listeners: Sequence[Listener]) -> tuple[list[Finding], _Recorded]:
    """What there is to say of it, and what workers have recorded in it."""
    if not outbox.engines.configured:
        return [_versions(outbox, None), _drivers(), Finding(Level.OK, "database", "none is set up")], _Recorded()
    examination = await outbox.store.inspection.examine()
    differences = await outbox.check_tables()
    findings = [_versions(outbox, examination), _drivers(), *_tables(differences), _clocks(examination)]
    findings += [*_bodies(outbox, examination), *examination.findings]
    if any(difference.breaks for difference in differences):
        return findings, _Recorded()
    try:
        findings += await _log(outbox)
        findings += await _messages(outbox, listeners)
        stale = await _rebinding(outbox).recorded(outbox.transport, listeners)
        return findings, _Recorded(await recorded_queues(outbox.store), stale)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _REFUSED:
            raise
        advice = "run doctor as a role that was granted the operator's rights: outbox tables sql --roles"
        return [*findings, Finding(Level.WARNING, "messages", "this role may not read them", advice)], _Recorded()


async def _broker(
    outbox: Outbox, listeners: Sequence[Listener], recorded: _Recorded, management_url: str
) -> Sequence[Finding]:
    settings = outbox.settings
    if not settings.routes and settings.transport in (None, IN_DATABASE):
        return ()
    fresh = settings.duration("fresh_dead_letters")
    if settings.routes:
        return await _destinations_of_routes(outbox, fresh, management_url)
    return await outbox.transport.examine(
        listeners, recorded=recorded.queues, stale=recorded.stale, fresh=fresh, admin_url=management_url
    )


async def _destinations_of_routes(outbox: Outbox, fresh: timedelta, management_url: str) -> list[Finding]:
    """Their queues belong to another service: no listener here needs them, and no worker has recorded them."""
    findings: list[Finding] = []
    admin_url = management_url if len(countable(outbox.transport)) == 1 else ""  # it is that of one broker
    for route in outbox.transport.routes:
        found = await route.transport.examine(fresh=fresh, admin_url=admin_url)
        findings += [replace(each, what=f"{route.name}: {each.what}") for each in found]
    return findings


def _rebinding(outbox: Outbox) -> Rebinding:
    return Rebinding(outbox.settings, lambda event: None, outbox.store)


def _versions(outbox: Outbox, examination: Examination | None) -> Finding:
    parts = [
        f"Python {platform.python_version()}",
        f"transactional-outbox {version('transactional-outbox')}",
        f"SQLAlchemy {version('sqlalchemy')}",
    ]
    if examination is not None:
        parts += [_with_version(outbox.engines.main.dialect.driver), examination.server]
    return Finding(Level.OK, "versions", ", ".join(parts))


def _drivers() -> Finding:
    installed = [
        f"{database}: {', '.join(map(_with_version, drivers)) or 'none'}"
        for database, drivers in installed_drivers().items()
    ]
    return Finding(Level.OK, "drivers", "; ".join(installed))


def _with_version(driver: str) -> str:
    try:
        return f"{driver} {version(driver)}"
    except PackageNotFoundError:  # it comes with Python
        return driver


def _tables(differences: list[Difference]) -> Iterator[Finding]:
    if not differences:
        yield Finding(Level.OK, "tables", "as this version needs them")
    for difference in differences:
        level = Level.ERROR if difference.breaks else Level.WARNING
        what = f"{difference.table}: {difference.what}"
        yield Finding(level, "tables", what, "outbox tables check prints the SQL that fixes it")


def _bodies(outbox: Outbox, examination: Examination) -> Iterator[Finding]:
    largest, wanted = examination.largest_body, outbox.settings.max_body_size
    if largest is not None and largest < wanted:
        what = f"the server takes bodies of {largest} bytes, and max_body_size={wanted} lets larger ones be emitted"
        yield Finding(
            Level.WARNING, "bodies", what, "raise what the server takes (max_allowed_packet), or lower max_body_size"
        )


def _clocks(examination: Examination) -> Finding:
    skew = examination.skew
    if abs(skew) <= LARGEST_SKEW:
        return Finding(Level.OK, "clocks", "this process and the database agree")
    what = f"the database is {in_words(abs(skew))} {'ahead of' if skew > timedelta(0) else 'behind'} this process"
    advice = "let both be set by NTP: a time that an eta names comes from this clock, and the database waits by its own"
    return Finding(Level.WARNING, "clocks", what, advice)


async def _messages(outbox: Outbox, listeners: Sequence[Listener]) -> list[Finding]:
    store = outbox.store
    fresh = outbox.settings.duration("fresh_dead_letters")
    recorded = await store.maintenance.recorded_transport()
    claimable = await store.inspection.claimable()
    backlog = await store.inspection.backlog()
    lost = await outbox.messages(state="unroutable", limit=1000)
    deaths = await store.dead_letters.deaths(fresh) if fresh else []
    of_others = await outbox.owners.findings(outbox.transport, listeners)
    if listeners and outbox.transport.features.in_store:
        of_others += await _rebinding(outbox).findings(outbox.transport, listeners)
    if outbox.transport.routes:
        further = further_keys(await store.queues.bindings(), outbox.transport.routes)
        of_others += [Finding(Level.WARNING, "bindings", each.told, each.removal) for each in further]
    patience = max(PATIENCE, 10 * outbox.settings.duration("poll_interval"))
    return [
        _transport(recorded, outbox.transport.name),
        *of_others,
        *_destinations(backlog),
        _leases(claimable, patience),
        *_overdue(claimable, patience, backlog),
        *await _refused(outbox, claimable, patience),
        *dead_letter_findings(deaths, fresh, "" if outbox.transport.features.in_store else "of relays"),
        *_nobody_asks(backlog, lost),
    ]


def _transport(recorded: str | None, configured: str) -> Finding:
    if recorded is None:
        return Finding(Level.OK, "transport", f"{configured}; no relay or worker has used the table yet")
    if recorded == configured:
        return Finding(Level.OK, "transport", configured)
    what = f"the table belongs to {recorded}, and {configured} is configured: relays and workers will not start"
    advice = (
        f"if the change is meant, stop the processes of {recorded} and run: outbox tables switch-transport {configured}"
    )
    return Finding(Level.ERROR, "transport", what, advice)


async def _log(outbox: Outbox) -> list[Finding]:
    """What reads the database's log, where a relay does or is to."""
    feeds = await outbox.store.owners.feeds()
    configured = outbox.settings.relay_from == "wal"
    if not feeds and not configured:
        return []
    slot = await outbox.wal.status()
    findings = [
        Finding(Level.ERROR, "write-ahead log", problem.split(": run ")[0], _advice(problem))
        for problem in slot.problems
    ]
    if feeds and not configured:
        what = "the table's messages come from the log, and relay_from is 'table' here: a relay will not start"
        findings.append(Finding(Level.ERROR, "write-ahead log", what, "set relay_from='wal', or run outbox wal drop"))
    if slot.exists and slot.active_pid is None:
        kept = "" if slot.retained_bytes is None else f", and the server keeps {in_bytes(slot.retained_bytes)} for it"
        what = f"no relay has the slot {slot.name}{kept}"
        findings.append(Finding(Level.WARNING, "write-ahead log", what, "start a relay: outbox relay --from wal"))
    if (slot.retained_bytes or 0) > MUCH_LOG or slot.wal_status == "unreserved":
        what = f"the slot {slot.name} is {slot.wal_status} and holds back {in_bytes(slot.retained_bytes or 0)}"
        advice = "see why its relay does not keep up; a destination that is away holds the log back, too"
        findings.append(Finding(Level.WARNING, "write-ahead log", what, advice))
    if slot.exists and slot.keep_size == "-1":
        what = "nothing limits what the server keeps for a slot: a relay that stands still fills the disk"
        advice = "set max_slot_wal_keep_size; a slot that is lost by it loses no message: outbox wal create --recreate"
        findings.append(Finding(Level.WARNING, "write-ahead log", what, advice))
    return findings or [Finding(Level.OK, "write-ahead log", f"read by the slot {slot.name}")]


def _advice(problem: str) -> str:
    return problem.partition(": run ")[2] or "see outbox wal status"


def _destinations(backlog: Backlog) -> Iterator[Finding]:
    """Of an outage no age of a message tells: what was tried in vain is due later."""
    for circuit in backlog.circuits:
        if circuit.failures:
            how = "does not answer" if circuit.refusing is None else "takes nothing"
            what = f"{circuit.destination or 'the destination'} {how}, failure {circuit.failures} in a row"
            advice = "mend the destination, or remove its route; relays ask it again and again, with one message"
            yield Finding(Level.WARNING, "destinations", f"{what}: {circuit.error}", advice)


def _leases(claimable: list[Claimable], patience: timedelta) -> Finding:
    late = [each for each in claimable if each.expired_for is not None and each.expired_for > patience]
    if late:
        since = max(each.expired_for for each in late if each.expired_for is not None)
        where = ", ".join(place_of(each.queue) for each in late)
        expired = sum(each.expired for each in late)
        what = f"{expired} ran out, the first {in_words(since)} ago, and no process has claimed "
        advice = "their worker died or hangs, and no other one serves the queue: check its processes"
        return Finding(Level.WARNING, "leases", f"{what}the messages since: {where}", advice)
    ends = [each.next_end for each in claimable if each.next_end is not None]
    soonest = f", the first ends in {in_words(min(ends))} unless it is renewed" if ends else ""
    return Finding(Level.OK, "leases", f"{sum(each.leased for each in claimable)} held{soonest}")


def _overdue(claimable: list[Claimable], patience: timedelta, backlog: Backlog) -> Iterator[Finding]:
    silent = {circuit.destination for circuit in backlog.circuits if circuit.failures}
    late = [each for each in claimable if each.overdue is not None and each.overdue > patience]
    if not late:
        yield Finding(Level.OK, "due messages", f"{sum(each.due for each in claimable)}, none for long")
    for each in late:
        what = f"{each.due} {place_of(each.queue)}, the oldest for {in_words(each.overdue or timedelta(0))}"
        if each.queue in silent:
            advice = "they go out when it answers; no message loses an attempt, but they may expire"
            yield Finding(Level.WARNING, "due messages", f"{what}: the destination does not answer", advice)
        elif each.leased:
            advice = "workers do not keep up: start more, or raise the concurrency of their listeners"
            yield Finding(Level.WARNING, "due messages", f"{what}, while {each.leased} are in work", advice)
        else:
            advice = "start a worker for the queue" if each.queue else "start a worker or a relay"
            yield Finding(Level.ERROR, "due messages", f"{what}, and no process claims them", advice)


async def _refused(outbox: Outbox, claimable: list[Claimable], patience: timedelta) -> list[Finding]:
    """What a destination refuses is due later, again and again: the age of what is due does not tell it."""
    by_relays = {None, *(route.name for route in outbox.transport.routes)}
    if outbox.transport.features.in_store and by_relays == {None}:
        return []
    found = []
    for each in claimable:
        if each.queue in by_relays and each.retried_for is not None and each.retried_for > patience:
            if each.queue is None:
                stored = await outbox.messages(state="waiting", limit=1000)
            else:
                stored = await outbox.messages(state="retrying", queue=each.queue, limit=1000)
            refused = [message for message in stored if message.attempt_count]
            what = (
                f"{each.retried} {place_of(each.queue)}, the oldest for {in_words(each.retried_for)}{_example(refused)}"
            )
            advice = "see what their destination says: outbox messages list, and show MESSAGE_ID; relays try them again"
            found.append(Finding(Level.ERROR, "refused messages", what, advice))
    return found


def _example(refused: Sequence[StoredMessage]) -> str:
    keys = Counter(stored.message.routing_key for stored in refused)
    told = [stored.history.strip().splitlines()[-1] for stored in refused if stored.history.strip()]
    return f": {_most_common(keys)}" + (f"; {told[-1]}" if told else "") if keys else ""


def _most_common(keys: Counter[str]) -> str:
    named = ", ".join(repr(key) for key, _ in keys.most_common(ROUTING_KEYS))
    return named + (" …" if len(keys) > ROUTING_KEYS else "")


def _nobody_asks(backlog: Backlog, lost: list[StoredMessage]) -> Iterator[Finding]:
    if backlog.unroutable:
        named = _most_common(Counter(stored.message.routing_key for stored in lost))
        advice = 'start a worker that listens for them, or discard them: unroutable={"…": "discard"}'
        yield Finding(
            Level.WARNING, "routing", f"{backlog.unroutable} unroutable, no queue is bound to them: {named}", advice
        )
    unbound = [found for found in backlog.queues if not found.binding_keys and found.open]
    for queue in unbound:
        what = f"{queue.open} in the queue {queue.queue!r}, to which nothing is bound any more"
        advice = "start a worker that listens on it, or a relay with this route, until it is empty"
        yield Finding(Level.WARNING, "routing", what, advice)
    if not backlog.unroutable and not unbound:
        yield Finding(Level.OK, "routing", "every message has a queue or waits to be routed")
