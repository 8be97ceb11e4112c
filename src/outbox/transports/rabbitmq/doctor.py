"""Doctor: how a broker differs from what listeners need, for `outbox doctor`. Nothing is made or changed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import aiormq
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelLockedResource, ChannelNotFoundEntity

from outbox.core.binding import Binding
from outbox.core.diagnosis import Finding, Level
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy
from outbox.core.store import QueueBacklog
from outbox.transports.rabbitmq.counting import count, of_listeners, queue_backlogs
from outbox.transports.rabbitmq.declaring import PRINTED, Declaring, ReopeningChannel
from outbox.transports.rabbitmq.management import Counts, ManagementAway, Seen, see
from outbox.transports.rabbitmq.mismatch import Mismatch, Severity, compare_exchange, compare_queue
from outbox.transports.rabbitmq.topology import DEAD_LETTER_SUFFIX, Names, QueueBinding, Topology, server_version

DOCTOR_CONNECT_WITHIN = 10.0  # seconds for a connection

_UNBIND = "if no other process needs it, run: outbox queues rebind MODULE:ATTRIBUTE"
_ALARM = "make room at the broker: rabbitmqctl status names the alarm; relays wait, and no message loses an attempt"
_UNKNOWN_QUEUES = Finding(
    Level.WARNING,
    "queues",
    "not known: consumers and dead letters were not looked at",
    "set rabbitmq_management_url, or name the listeners: outbox doctor MODULE:ATTRIBUTE",
)
_MAKE = f"start a worker whose user may make them, or provision them: {PRINTED}"


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found, and the numbers of the queues that are known."""

    findings: list[Finding]
    reached: bool = True
    queues: Sequence[QueueBacklog] = ()


def alarm(trouble: str | None) -> Iterator[Finding]:
    """What keeps a broker that can be reached from taking messages."""
    if trouble is not None:
        yield Finding(Level.ERROR, "broker", trouble, _ALARM)


async def examine(
    url: str,
    names: Names,
    listeners: Sequence[Listener],
    retry_policy: RetryPolicy,
    *,
    recorded: Collection[str] = (),
    stale: Collection[Binding] | None = None,
    management_url: str = "",
    tls: ssl.SSLContext | None = None,
) -> Examined:
    """Everything that can be said of the broker at this URL; without listeners, of the queues that were recorded."""
    try:
        async with asyncio.timeout(DOCTOR_CONNECT_WITHIN):
            connection = await aiormq.connect(url, context=tls)
    except (AMQPError, OSError, TimeoutError, ValueError) as error:
        what = f"cannot be reached at {_place(url)}: {_words(error)}"
        advice = "see that it runs, and that the user may use the virtual host"
        return Examined([Finding(Level.ERROR, "broker", what, advice)], reached=False)
    asking = ReopeningChannel(connection.channel)
    findings: list[Finding] = []
    try:
        version = str(connection.server_properties.get("version", ""))
        findings.append(Finding(Level.OK, "broker", f"RabbitMQ {version} at {_place(url)}"))
        try:
            seen = await see(management_url, url)
        except ManagementAway as away:
            seen = None
            findings.append(_not_seen(away, listeners, stale))
        known = of_listeners(names, recorded) | {names.queue(listener.queue) for listener in listeners}
        queues = await queue_backlogs(asking, names, known, (), seen)
        if not listeners:
            what = "not compared: outbox doctor MODULE:ATTRIBUTE says whether they are what these listeners need"
            findings.append(Finding(Level.OK, "exchanges and queues", what))
            if seen is None and not queues:
                findings.append(_UNKNOWN_QUEUES)
            findings += _recorded_consumers(names, queues)
            return Examined(findings, queues=queues)
        delays = retry_policy.known_delays() or ()
        needed = Topology.of(names, listeners, delays, server_version=server_version(version))
        comparison = await _compare(asking, needed, seen)
        findings += [*_missing(comparison), *_exchanges(comparison), *_queues(comparison), *_consumers(comparison)]
        if seen is None:
            findings += _recorded_bindings(names, stale)
        else:
            findings += _bindings(comparison, seen)
            findings += await _orphans(asking, Topology.of(names, listeners, delays, steps=True), seen)
        return Examined(findings, queues=queues)
    except (AMQPError, OSError, TimeoutError) as error:
        what = f"went away while it was looked at: {_words(error)}"
        return Examined([*findings, Finding(Level.ERROR, "broker", what, "run doctor again")], reached=False)
    finally:
        await connection.close()


def _not_seen(away: ManagementAway, listeners: Sequence[Listener], stale: Collection[Binding] | None) -> Finding:
    level, unseen = Level.OK, "queues that no worker of this database has recorded"
    if listeners:
        level = Level.WARNING if stale is None else Level.OK
        unseen = f"bindings{'' if stale is None else ' of others'} and orphaned queues"
    advice = "name it with --management-url if it is elsewhere"
    return Finding(level, "management", f"not reachable: {away}; {unseen} were not looked at", advice)


def _recorded_bindings(names: Names, stale: Collection[Binding] | None) -> Iterator[Finding]:
    """Those that the broker does not tell and workers of this database have made."""
    for each in stale or ():
        yield _stale(QueueBinding(names.exchange, names.queue(each.queue), each.binding_key))
    if stale is not None and not stale:
        yield Finding(Level.OK, "bindings", "those that workers of this database made are what the listeners ask for")


@dataclass
class _Comparison:
    needed: Topology
    missing: list[tuple[str, str]] = field(default_factory=list)  # ("queue", its name)
    mismatches: list[Mismatch] = field(default_factory=list)
    compared: bool = True  # otherwise this user may not know arguments
    untold: list[tuple[str, str]] = field(default_factory=list)  # whether these are there, this user may not know
    found: dict[str, Counts] = field(default_factory=dict)  # by queue


async def _compare(asking: ReopeningChannel, needed: Topology, seen: Seen | None) -> _Comparison:
    comparison = _Comparison(needed)
    declaring = Declaring(asking)
    for exchange in (*needed.exchanges, *((needed.marker,) if needed.marker else ())):
        exists = await _exists(asking, exchange.name)
        if exists is None and seen is not None:
            exists = exchange.name in seen.exchanges
        if exists is None:
            comparison.untold.append(("exchange", exchange.name))
        elif not exists:
            comparison.missing.append(("exchange", exchange.name))
        elif seen is not None and exchange.name in seen.exchanges:
            comparison.mismatches += compare_exchange(exchange, seen.exchanges[exchange.name])
        elif comparison.compared:
            comparison.compared = await _tried(declaring.declare_exchange(exchange))
    for queue in needed.queues:
        counts = await count(asking, queue.name)
        if counts is None:
            comparison.missing.append(("queue", queue.name))
            continue
        there = None if seen is None else seen.queues.get(queue.name)
        if counts.consumers is None and there is None:
            comparison.untold.append(("queue", queue.name))
        elif counts.consumers is None and there is not None:
            counts = there.counts or counts
        comparison.found[queue.name] = counts
        if there is not None:
            comparison.mismatches += compare_queue(queue, there.arguments, durable=there.durable, policy=there.policy)
        elif comparison.compared:
            comparison.compared = await _tried(declaring.declare_queue(queue))
    comparison.mismatches += [*declaring.wrong, *declaring.weaker]
    return comparison


async def _exists(asking: ReopeningChannel, exchange: str) -> bool | None:
    """None: this user may not know. RabbitMQ from 4.3 on tells only those who have some right on the name."""
    try:
        await asking.ask(lambda channel: channel.exchange_declare(exchange, passive=True))
    except ChannelNotFoundEntity:
        return False
    except ChannelAccessRefused:
        return None
    return True


async def _tried(comparison: Awaitable[None]) -> bool:
    try:
        await comparison
    except (ChannelAccessRefused, ChannelLockedResource):
        return False
    return True


def _missing(comparison: _Comparison) -> Iterator[Finding]:
    """Before the first worker has started that is all of them: it is one thing to do, and told once."""
    if comparison.missing:
        names = ", ".join(dict.fromkeys(repr(name) for _, name in comparison.missing))
        all_of_it = not comparison.found and len(comparison.missing) > len(comparison.needed.queues)
        what = f"nothing of {names} is there yet" if all_of_it else f"missing: {names}"
        yield Finding(Level.ERROR, "exchanges and queues", what, _MAKE)


def _exchanges(comparison: _Comparison) -> Iterator[Finding]:
    missing = [name for what, name in comparison.missing if what == "exchange"]
    wrong = [mismatch for mismatch in comparison.mismatches if mismatch.what == "exchange"]
    yield from map(_told, wrong)
    if not missing and not wrong:
        what = f"{len(comparison.needed.exchanges) + 1}, as the listeners need them{_untold(comparison, 'exchange')}"
        yield Finding(Level.OK, "exchanges", what)


def _queues(comparison: _Comparison) -> Iterator[Finding]:
    missing = [name for what, name in comparison.missing if what == "queue"]
    differing = [
        mismatch
        for mismatch in comparison.mismatches
        if mismatch.what == "queue" and mismatch.weight is not Severity.HARMLESS
    ]
    yield from map(_told, differing)
    if not missing and not differing:
        arguments = "" if comparison.compared else "; this user may not see their arguments"
        arguments += _untold(comparison, "queue")
        yield Finding(Level.OK, "queues", f"{len(comparison.found)}, as the listeners need them{arguments}")


def _untold(comparison: _Comparison, what: str) -> str:
    names = [name for kind, name in comparison.untold if kind == what]
    return f"; this user may not see whether there is {', '.join(map(repr, names))}" if names else ""


def _told(mismatch: Mismatch) -> Finding:
    level = Level.ERROR if mismatch.weight is Severity.WRONG else Level.WARNING
    mending = mismatch.way_out_beside_messages
    if mending is not None:
        advice = f"unless a policy says so already, while it is in use: {mending}"
        return Finding(level, f"{mismatch.what}s", f"{mismatch}: {mismatch.consequence}", advice)
    advice = f"when it is empty and not in use, delete it and start a worker: {mismatch.way_out}"
    return Finding(level, f"{mismatch.what}s", str(mismatch), advice)


def _bindings(comparison: _Comparison, seen: Seen) -> Iterator[Finding]:
    needed, absent = comparison.needed, {name for _, name in comparison.missing}
    missing = [binding for binding in needed.bindings if binding not in seen.bindings]
    told = [binding for binding in missing if not {binding.exchange, binding.queue} & absent]
    for binding in told:
        what = f"{_arrow(binding)} is missing, so that messages do not get there"
        yield Finding(Level.ERROR, "bindings", what, _MAKE)
    own = {queue.name for queue in needed.queues}
    stale = [
        binding
        for binding in sorted(seen.bindings - set(needed.bindings), key=_arrow)
        if binding.queue in own and needed.names.owns(binding.exchange)
    ]
    yield from map(_stale, stale)
    if not missing and not stale:
        yield Finding(Level.OK, "bindings", f"{len(needed.bindings)}, as the listeners need them")


def _stale(binding: QueueBinding) -> Finding:
    what = f"{_arrow(binding)} is not what a listener asks for, and messages get there nevertheless"
    return Finding(Level.WARNING, "bindings", what, _UNBIND)


def _consumers(comparison: _Comparison) -> Iterator[Finding]:
    found = {
        queue: counts
        for queue in comparison.needed.consumed
        if (counts := comparison.found.get(queue)) is not None and counts.consumers is not None
    }
    yield from _idle({queue: counts for queue, counts in found.items() if counts.consumers == 0}, len(found))


def _recorded_consumers(names: Names, queues: Sequence[QueueBacklog]) -> Iterator[Finding]:
    known = [each for each in queues if each.consumers is not None]
    idle = {names.queue(each.queue): Counts(each.queued, 0) for each in known if each.consumers == 0}
    yield from _idle(idle, len(known))


def _idle(idle: Mapping[str, Counts], known: int) -> Iterator[Finding]:
    """Queues without a consumer, of so many."""
    for queue, counts in idle.items():
        level = Level.ERROR if counts.messages else Level.WARNING
        what = f"no worker consumes {queue!r}, {counts.messages} waiting"
        yield Finding(level, "consumers", what, "start a worker for it, or look why the one that runs does not consume")
    if known and not idle:
        yield Finding(Level.OK, "consumers", f"every queue has one, of {known}")


async def _orphans(asking: ReopeningChannel, known: Topology, seen: Seen) -> Iterable[Finding]:
    """Queues of this exchange that none of these listeners needs, and no other service either as far as can be seen."""
    names = known.names
    bound = {each.queue for each in seen.bindings if names.owns(each.exchange)}
    strangers = sorted(bound - {queue.name for queue in known.queues})
    counted = {queue: await count(asking, queue, seen) for queue in strangers}
    counts = {queue: found for queue, found in counted.items() if found is not None and found.consumers is not None}
    served = {queue for queue, found in counts.items() if found.consumers}
    # Dead letters belong to queues that are served, and delays are shared: other queues that are served may use them.
    orphans = [
        queue
        for queue in counts
        if queue.removesuffix(DEAD_LETTER_SUFFIX) not in served
        and not (served and queue.startswith(names.delay_prefix))
    ]
    return [
        Finding(
            Level.WARNING,
            "orphaned queues",
            f"none of these listeners needs {queue!r} and no worker consumes it, {counts[queue].messages or 0} waiting",
            f"if no other program needs it: rabbitmqctl delete_queue {queue}",
        )
        for queue in orphans
    ] or [Finding(Level.OK, "orphaned queues", "none")]


def _arrow(binding: QueueBinding) -> str:
    return f"{binding.exchange!r} to {binding.queue!r} by {binding.routing_key!r}"


def _place(url: str) -> str:
    """Where a broker is, without who logs in there."""
    found = urlsplit(url)
    return f"{found.netloc.rpartition('@')[2]}/{unquote(found.path[1:])}"


def _words(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
