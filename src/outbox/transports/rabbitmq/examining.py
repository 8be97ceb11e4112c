"""Examining: how a broker differs from what listeners need, for `outbox doctor`. Nothing is made or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import aiormq
from aiormq.abc import AbstractConnection
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelLockedResource, ChannelNotFoundEntity

from outbox.core.diagnosis import Finding, Level
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy
from outbox.transports.rabbitmq.comparing import Mismatch, Weight, compare_exchange, compare_queue
from outbox.transports.rabbitmq.declaring import PRINTED, Asking, Declaring
from outbox.transports.rabbitmq.management import ManagementAway, Seen, see
from outbox.transports.rabbitmq.topology import DEAD_LETTER_SUFFIX, Names, QueueBinding, Topology, server_version

PATIENCE = 10.0  # seconds for a connection

_MAKE = f"start a worker whose user may make them, or provision them: {PRINTED}"


async def examine(
    url: str,
    names: Names,
    listeners: Sequence[Listener],
    retry_policy: RetryPolicy,
    *,
    management_url: str = "",
) -> list[Finding]:
    """Everything that can be said of the broker at this URL; without listeners, that is not much."""
    try:
        async with asyncio.timeout(PATIENCE):
            connection = await aiormq.connect(url)
    except (AMQPError, OSError, TimeoutError, ValueError) as error:
        what = f"cannot be reached at {_place(url)}: {_words(error)}"
        return [Finding(Level.ERROR, "broker", what, "see that it runs, and that the user may use the virtual host")]
    try:
        version = str(connection.server_properties.get("version", ""))
        findings = [Finding(Level.OK, "broker", f"RabbitMQ {version} at {_place(url)}")]
        if not listeners:
            what = "not looked at: outbox doctor MODULE:ATTRIBUTE compares them with what these listeners need"
            return [*findings, Finding(Level.OK, "exchanges and queues", what)]
        delays = retry_policy.known_delays() or ()
        needed = Topology.of(names, listeners, delays, server_version=server_version(version))
        try:
            seen = await see(management_url, url)
        except ManagementAway as away:
            seen = None
            what = f"not reachable: {away}; bindings and orphaned queues were not looked at"
            findings.append(Finding(Level.OK, "management", what, "name it with --management-url if it is elsewhere"))
        look = await _look(connection, needed, seen)
        findings += [*_exchanges(look), *_queues(look), *_consumers(look)]
        if seen is not None:
            findings += _bindings(needed, seen)
            findings += await _orphans(connection, Topology.of(names, listeners, delays, steps=True), seen)
        return findings
    finally:
        await connection.close()


@dataclass
class _Look:
    needed: Topology
    missing: list[tuple[str, str]] = field(default_factory=list)  # ("queue", its name)
    mismatches: list[Mismatch] = field(default_factory=list)
    compared: bool = True  # otherwise this user may not know arguments
    found: dict[str, tuple[int, int]] = field(default_factory=dict)  # messages and consumers by queue


async def _look(connection: AbstractConnection, needed: Topology, seen: Seen | None) -> _Look:
    look = _Look(needed)
    asking = Asking(connection.channel)
    declaring = Declaring(asking)
    for exchange in (*needed.exchanges, *((needed.marker,) if needed.marker else ())):
        if not await _exists(asking, exchange.name):
            look.missing.append(("exchange", exchange.name))
        elif seen is not None and exchange.name in seen.exchanges:
            look.mismatches += compare_exchange(exchange, seen.exchanges[exchange.name])
        elif look.compared:
            look.compared = await _tried(declaring.declare_exchange(exchange))
    for queue in needed.queues:
        counts = await _counts(asking, queue.name)
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
    await asking.close()
    return look


async def _exists(asking: Asking, exchange: str) -> bool:
    try:
        await asking.ask(lambda channel: channel.exchange_declare(exchange, passive=True))
    except ChannelNotFoundEntity:
        return False
    return True


async def _counts(asking: Asking, queue: str) -> tuple[int, int] | None:
    """How many messages and consumers a queue has; None: there is no such queue."""
    try:
        found = await asking.ask(lambda channel: channel.queue_declare(queue, passive=True))
    except ChannelNotFoundEntity:
        return None
    except ChannelLockedResource:  # one connection has it to itself; that it is not durable is told
        return 0, 0
    return found.message_count or 0, found.consumer_count or 0


async def _tried(comparison: Awaitable[None]) -> bool:
    try:
        await comparison
    except (ChannelAccessRefused, ChannelLockedResource):
        return False
    return True


def _exchanges(look: _Look) -> Iterator[Finding]:
    missing = [name for what, name in look.missing if what == "exchange"]
    for name in missing:
        yield Finding(Level.ERROR, "exchanges", f"{name!r} is missing", _MAKE)
    wrong = [mismatch for mismatch in look.mismatches if mismatch.what == "exchange"]
    yield from map(_told, wrong)
    if not missing and not wrong:
        yield Finding(Level.OK, "exchanges", f"{len(look.needed.exchanges) + 1}, as the listeners need them")


def _queues(look: _Look) -> Iterator[Finding]:
    missing = [name for what, name in look.missing if what == "queue"]
    for name in missing:
        yield Finding(Level.ERROR, "queues", f"{name!r} is missing", _MAKE)
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


def _bindings(needed: Topology, seen: Seen) -> Iterator[Finding]:
    missing = [binding for binding in needed.bindings if binding not in seen.bindings]
    for binding in missing:
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
        yield Finding(Level.WARNING, "bindings", what, "if nobody needs them, unbind it in the management interface")
    if not missing and not stale:
        yield Finding(Level.OK, "bindings", f"{len(needed.bindings)}, as the listeners need them")


def _consumers(look: _Look) -> Iterator[Finding]:
    idle = [queue for queue in look.needed.consumed if queue in look.found and not look.found[queue][1]]
    for queue in idle:
        messages, _ = look.found[queue]
        level = Level.ERROR if messages else Level.WARNING
        what = f"nobody consumes {queue!r}, {messages} waiting"
        yield Finding(level, "consumers", what, "start a worker for it, or look why the one that runs does not consume")
    if not idle:
        yield Finding(Level.OK, "consumers", "every queue has one")


async def _orphans(connection: AbstractConnection, known: Topology, seen: Seen) -> Iterable[Finding]:
    """Queues of this exchange that none of these listeners needs, and nobody else either as far as can be seen."""
    names, asking = known.names, Asking(connection.channel)
    bound = {each.queue for each in seen.bindings if names.owns(each.exchange)}
    strangers = sorted(bound - {queue.name for queue in known.queues})
    counts = {queue: found for queue in strangers if (found := await _counts(asking, queue)) is not None}
    await asking.close()
    served = {queue for queue, (_, consumers) in counts.items() if consumers}
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
            f"none of these listeners needs {queue!r} and nobody consumes it, {counts[queue][0]} waiting",
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
