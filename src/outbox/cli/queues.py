"""`outbox queues`: the bindings of queues, and how many messages are in them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from outbox.cli import screen, words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.logs import hush_clients
from outbox.cli.targets import AsJson, ListenersName, OutboxName, find_listeners, find_outbox
from outbox.core.binding import Binding
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener, check_listeners
from outbox.core.store import IN_DATABASE, Backlog, QueueBacklog
from outbox.core.transport import countable
from outbox.instance import Outbox
from outbox.rebinding import Rebinding

app = typer.Typer(help="List queues, replace or remove their bindings, release them.", no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]

_ADVICE = {"rabbitmq": ": no worker has recorded one in this database, and rabbitmq_management_url is not set, or away"}

_DELETE = {"rabbitmq": "rabbitmqctl delete_queue"}


@app.command("list", short_help="List queues.")
def list_queues(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """List queues: their binding keys and how many messages are in them."""
    outbox = find_outbox(outbox_name)
    found = ask(outbox, outbox.backlog)
    if as_json:
        print_document({"queues": found.queues, "queues_known": not _are_unknown(found, counted_transport(outbox))})
    else:
        screen.show(*queue_parts(found, counted_transport(outbox)))


@app.command("remove", short_help="Remove a queue's bindings.")
def remove_queue(queue: Queue, as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Remove a queue's bindings in the database, so that it gets no further messages.

    Its messages stay, for a worker that serves it. A worker that starts with its listener, or a relay with
    such a route, binds it again. A queue of a broker is deleted there.
    """
    outbox = find_outbox(outbox_name)
    removed, left = ask(outbox, lambda: _remove(outbox, queue))
    if not removed and left is None:
        raise Failure(ExitCode.WRONG, _not_in_database(outbox, queue))
    if as_json:
        print_document({"queue": queue, "removed": removed, "left": left})
        return
    print(f"removed {words.count(removed, 'binding')} of {words.printable(queue)}")
    if left is not None and (left.open or left.dead):
        print(f"in it still: {words.count(left.open, 'message')}, {words.count(left.dead or 0, 'dead letter')}")


@app.command("release", short_help="Remove the record of which service a queue belongs to.")
def release_queue(queue: Queue, as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Remove the record of a queue's service, after the service was renamed or the queue was given to another.

    From then on it belongs to the service whose worker starts first.
    """
    outbox = find_outbox(outbox_name)
    service = ask(outbox, lambda: outbox.store.owners.release(queue)) if queue else None
    if service is None:
        raise Failure(ExitCode.WRONG, f"no service is recorded for the queue {queue!r}")
    if as_json:
        print_document({"queue": queue, "service": service})
    else:
        print(f"{words.printable(queue)} does not belong to {words.printable(service)} any more")


@app.command("rebind", short_help="Bind queues by the keys of their listeners, and remove all other keys.")
def rebind_queues(listeners_name: ListenersName, as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Bind the queues of these listeners by the listeners' keys, and remove all other keys of these queues.

    A worker that starts adds the keys of its listeners and removes none, so that workers of two versions can run side
    by side. Run this when those of the old version have ended. What already lies in a queue stays there.

    On RabbitMQ the management interface is asked: OUTBOX_RABBITMQ_MANAGEMENT_URL, or port 15672 (15671 with TLS) of the
    broker's host. If neither is there, what workers of the same database have bound is known.
    """
    hush_clients()
    listeners = find_listeners(listeners_name)
    check_listeners(listeners)
    outbox = find_outbox(outbox_name)
    stale = ask(outbox, lambda: _rebind(outbox, listeners), needs_tables=outbox.transport.name == IN_DATABASE)
    removed = {
        each.queue: [binding.binding_key for binding in stale if binding.queue == each.queue] for each in listeners
    }
    if as_json:
        queues = [
            {"queue": each.queue, "binding_key": each.binding_key, "removed": removed[each.queue]} for each in listeners
        ]
        print_document({"queues": queues})
        return
    for each in listeners:
        gone = f", and no more {', '.join(removed[each.queue])}" if removed[each.queue] else ""
        print(words.printable(f"{each.queue} gets {each.binding_key}{gone}"))


async def _rebind(outbox: Outbox, listeners: Sequence[Listener]) -> list[Binding]:
    transport = outbox.transport
    if not transport.features.changes_bindings:
        raise Failure(ExitCode.CONFIGURATION, f"the transport {transport.name!r} has no queues that could be bound")
    await transport.open()
    try:
        await transport.declare(listeners)
        has_tables = outbox.engines.configured and await outbox.store.maintenance.has_tables()
        store = outbox.store if has_tables else None
        return await Rebinding(outbox.settings, lambda event: None, store).replace(transport, listeners)
    finally:
        await transport.close()


async def _remove(outbox: Outbox, queue: str) -> tuple[int, QueueBacklog | None]:
    removed = await outbox.unbind(queue)
    backlog = await outbox.store.inspection.backlog()
    return removed, next((found for found in backlog.queues if found.queue == queue), None)


def _not_in_database(outbox: Outbox, queue: str) -> str:
    """Why nothing was removed. A list of queues shows those of a broker too, which this command does not touch."""
    transport = outbox.transport
    if transport.name not in _DELETE:
        return f"no queue is called {queue!r}; see: outbox queues list"
    where = f"one of {transport.name} is deleted there"
    with suppress(ConfigurationError):  # it cannot be the name of one
        where += f": {_DELETE[transport.name]} {shlex.quote(transport.queue_name(queue))}"
    return f"the database has no queue {queue!r}. This command is for queues of the database only; {where}"


def counted_transport(outbox: Outbox) -> str | None:
    """The name of the transport, or of a route's, if it has queues of its own that can be counted."""
    return next((transport.name for transport in countable(outbox.transport)), None)


def queue_parts(backlog: Backlog, transport: str | None) -> list[RenderableType]:
    """The table of queues, and what has to be said of those that are not in it."""
    parts: list[RenderableType] = [queue_table(backlog.queues)] if backlog.queues else []
    if _are_unknown(backlog, transport):
        return [*parts, screen.note(f"the queues of {transport} are not known{_ADVICE.get(transport or '', '')}")]
    # Where there is one destination without routes it stays like this.
    return parts or [
        screen.note("no queue in the database: workers and relays with routes bind theirs when they start")
    ]


def _are_unknown(backlog: Backlog, transport: str | None) -> bool:
    """Whether the transport has queues of its own of which not even the names are known."""
    at_broker = any(found.transport != IN_DATABASE for found in backlog.queues)
    return transport is not None and backlog.dead is None and not at_broker


def queue_table(queues: Sequence[QueueBacklog]) -> Table:
    """Queues as status and `queues list` show them; where they are is shown if some are at a broker."""
    numbers = ("queued", "retrying", "leased", "dead", "oldest")
    at_broker = ("transport", "consumers") if any(found.transport != IN_DATABASE for found in queues) else ()
    return screen.table(
        ("queue", *at_broker, "binding keys", *numbers),
        [
            (
                found.queue,
                *([found.transport, _consumers(found)] if at_broker else []),
                _told(None if found.binding_keys is None else ", ".join(found.binding_keys) or words.NOTHING),
                *map(_told, (found.queued, found.retrying, found.leased, found.dead)),
                _told(None) if found.transport != IN_DATABASE and found.queued != 0 else words.duration(found.oldest),
            )
            for found in queues
        ],
        numbers=(*at_broker[1:], *numbers),
    )


def _consumers(found: QueueBacklog) -> object:
    """Only queues of a broker have any."""
    has_none = found.transport == IN_DATABASE or (found.queued == 0 and found.consumers is None)
    return words.NOTHING if has_none else _told(found.consumers)


def _told(value: object) -> object:
    return words.UNKNOWN if value is None else value
