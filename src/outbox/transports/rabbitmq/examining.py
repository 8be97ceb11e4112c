"""Examining: how a broker differs from what listeners need, for `outbox doctor`. Nothing is made or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import aiormq
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelLockedResource, ChannelNotFoundEntity

from outbox.core.diagnosis import Finding, Level
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy
from outbox.core.store import QueueBacklog
from outbox.transports.rabbitmq.comparing import Mismatch, Weight, compare_exchange, compare_queue
from outbox.transports.rabbitmq.counting import count, of_listeners, queue_backlogs
from outbox.transports.rabbitmq.declaring import PRINTED, Asking, Declaring
from outbox.transports.rabbitmq.management import Counts, ManagementAway, Seen, see
from outbox.transports.rabbitmq.topology import DEAD_LETTER_SUFFIX, Names, QueueBinding, Topology, server_version

PATIENCE = 10.0  # seconds for a connection

_UNBIND = "if no other process needs it, run: outbox queues rebind MODULE:ATTRIBUTE"
_MAKE = f"start a worker whose user may make them, or provision them: {PRINTED}"


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found, and what lies in the queues that are known."""

    findings: list[Finding]
    reached: bool = True
    queues: Sequence[QueueBacklog] = ()


async def examine(
    url: str,
    names: Names,
    listeners: Sequence[Listener],
    retry_policy: RetryPolicy,
    *,
    recorded: Collection[str] = (),
    management_url: str = "",
) -> Examined:
    """Everything that can be said of the broker at this URL; without listeners, of the queues that were recorded."""
    try:
        async with asyncio.timeout(PATIENCE):
            connection = await aiormq.connect(url)
    except (AMQPError, OSError, TimeoutError, ValueError) as error:
        what = f"cannot be reached at {_place(url)}: {_words(error)}"
        advice = "see that it runs, and that the user may use the virtual host"
        return Examined([Finding(Level.ERROR, "broker", what, advice)], reached=False)
    asking = Asking(connection.channel)
    try:
        version = str(connection.server_properties.get("version", ""))
        findings = [Finding(Level.OK, "broker", f"RabbitMQ {version} at {_place(url)}")]
        try:
            seen = await see(management_url, url)
        except ManagementAway as away:
            seen = None
            findings.append(_not_seen(away, listeners))
        known = of_listeners(names, recorded) | {names.queue(listener.queue) for listener in listeners}
        queues = await queue_backlogs(asking, names, known, (), seen)
        if not listeners:
            what = "not compared: outbox doctor MODULE:ATTRIBUTE says whether they are what these listeners need"
            findings.append(Finding(Level.OK, "exchanges and queues", what))
            findings += await _recorded_consumers(asking, names, queues)
            return Examined(findings, queues=queues)
        delays = retry_policy.known_delays() or ()
        needed = Topology.of(names, listeners, delays, server_version=server_version(version))
        look = await _look(asking, needed, seen)
        findings += [*_missing(look), *_exchanges(look), *_queues(look), *_consumers(look)]
        if seen is not None:
            findings += _bindings(look, seen)
            findings += await _orphans(asking, Topology.of(names, listeners, delays, steps=True), seen)
        return Examined(findings, queues=queues)
    finally:
        await connection.close()


def _not_seen(away: ManagementAway, listeners: Sequence[Listener]) -> Finding:
    unseen = "bindings and orphaned queues" if listeners else "queues that no worker of this database has recorded"
    advice = "name it with --management-url if it is elsewhere"
    return Finding(Level.OK, "management", f"not reachable: {away}; {unseen} were not looked at", advice)


@dataclass
class _Look:
    needed: Topology
    missing: list[tuple[str, str]] = field(default_factory=list)  # ("queue", its name)
    mismatches: list[Mismatch] = field(default_factory=list)
    compared: bool = True  # otherwise this user may not know arguments
    found: dict[str, Counts] = field(default_factory=dict)  # by queue


async def _look(asking: Asking, needed: Topology, seen: Seen | None) -> _Look:
    look = _Look(needed)
    declaring = Declaring(asking)
    for exchange in (*needed.exchanges, *((needed.marker,) if needed.marker else ())):
        if not await _exists(asking, exchange.name):
            look.missing.append(("exchange", exchange.name))
        elif seen is not None and exchange.name in seen.exchanges:
            look.mismatches += compare_exchange(exchange, seen.exchanges[exchange.name])
        elif look.compared:
            look.compared = await _tried(declaring.declare_exchange(exchange))
    for queue in needed.queues:
        counts = await count(asking, queue.name)
        if counts is None:
            look.missing.append(("queue", queue.name))
            continue
        look.found[queue.name] = counts
        if seen is not None and queue.name in seen.queues:
            there = seen.queues[queue.name]
            look.mismatches += compare_queue(queue, there.arguments, durable=there.durable)
        elif look.compared:
            look.compared = await _tried(declaring.declare_queue(queue))
    look.mismatches += [*declaring.wrong, *declaring.weaker]
    return look


async def _exists(asking: Asking, exchange: str) -> bool:
    try:
        await asking.ask(lambda channel: channel.exchange_declare(exchange, passive=True))
    except ChannelNotFoundEntity:
        return False
    return True


async def _tried(comparison: Awaitable[None]) -> bool:
    try:
        await comparison
    except (ChannelAccessRefused, ChannelLockedResource):
        return False
    return True


def _missing(look: _Look) -> Iterator[Finding]:
    """Before the first worker has started that is all of them: it is one thing to do, and told once."""
    if look.missing:
        names = ", ".join(dict.fromkeys(repr(name) for _, name in look.missing))
        all_of_it = not look.found and len(look.missing) > len(look.needed.queues)
        what = f"nothing of {names} is there yet" if all_of_it else f"missing: {names}"
        yield Finding(Level.ERROR, "exchanges and queues", what, _MAKE)


def _exchanges(look: _Look) -> Iterator[Finding]:
    missing = [name for what, name in look.missing if what == "exchange"]
    wrong = [mismatch for mismatch in look.mismatches if mismatch.what == "exchange"]
    yield from map(_told, wrong)
    if not missing and not wrong:
        yield Finding(Level.OK, "exchanges", f"{len(look.needed.exchanges) + 1}, as the listeners need them")


def _queues(look: _Look) -> Iterator[Finding]:
    missing = [name for what, name in look.missing if what == "queue"]
    differing = [
        mismatch for mismatch in look.mismatches if mismatch.what == "queue" and mismatch.weight is not Weight.HARMLESS
    ]
    yield from map(_told, differing)
    if not missing and not differing:
        arguments = "" if look.compared else "; this user may not see their arguments"
        yield Finding(Level.OK, "queues", f"{len(look.found)}, as the listeners need them{arguments}")


def _told(mismatch: Mismatch) -> Finding:
    level = Level.ERROR if mismatch.weight is Weight.WRONG else Level.WARNING
    advice = f"when it is empty and nobody uses it, delete it and start a worker: {mismatch.way_out}"
    return Finding(level, f"{mismatch.what}s", str(mismatch), advice)


def _bindings(look: _Look, seen: Seen) -> Iterator[Finding]:
    needed, absent = look.needed, {name for _, name in look.missing}
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
    for binding in stale:
        what = f"{_arrow(binding)} is not what a listener asks for, and messages get there nevertheless"
        yield Finding(Level.WARNING, "bindings", what, _UNBIND)
    if not missing and not stale:
        yield Finding(Level.OK, "bindings", f"{len(needed.bindings)}, as the listeners need them")


def _consumers(look: _Look) -> Iterator[Finding]:
    found = {queue: look.found[queue] for queue in look.needed.consumed if queue in look.found}
    yield from _idle({queue: counts for queue, counts in found.items() if counts.consumers == 0}, len(found))


async def _recorded_consumers(asking: Asking, names: Names, queues: Sequence[QueueBacklog]) -> Iterable[Finding]:
    """The management interface may be some seconds late: what seems to have no consumer is asked for again."""
    idle = {}
    for each in queues:
        queue = names.queue(each.queue)
        counts = await count(asking, queue) if each.consumers == 0 else None
        if counts is not None and counts.consumers == 0:
            idle[queue] = Counts(max(each.delivered or 0, counts.messages or 0), 0)
    return list(_idle(idle, sum(each.consumers is not None for each in queues)))


def _idle(idle: Mapping[str, Counts], known: int) -> Iterator[Finding]:
    """Queues without a consumer, of so many."""
    for queue, counts in idle.items():
        level = Level.ERROR if counts.messages else Level.WARNING
        what = f"nobody consumes {queue!r}, {counts.messages} waiting"
        yield Finding(level, "consumers", what, "start a worker for it, or look why the one that runs does not consume")
    if known and not idle:
        yield Finding(Level.OK, "consumers", f"every queue has one, of {known}")


async def _orphans(asking: Asking, known: Topology, seen: Seen) -> Iterable[Finding]:
    """Queues of this exchange that none of these listeners needs, and nobody else either as far as can be seen."""
    names = known.names
    bound = {each.queue for each in seen.bindings if names.owns(each.exchange)}
    strangers = sorted(bound - {queue.name for queue in known.queues})
    counts = {queue: found for queue in strangers if (found := await count(asking, queue)) is not None}
    served = {queue for queue, found in counts.items() if found.consumers}
    # Dead letters belong to whoever is served, and delays are shared: others who are served may use them.
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
            f"none of these listeners needs {queue!r} and nobody consumes it, {counts[queue].messages or 0} waiting",
            f"if nobody else needs it either: rabbitmqctl delete_queue {queue}",
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
