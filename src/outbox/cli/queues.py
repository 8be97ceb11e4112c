"""`outbox queues`: who asks for what, and what lies there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from outbox.cli import screen, words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.store import QueueBacklog
from outbox.instance import Outbox

app = typer.Typer(help="List queues, remove their bindings, release them.", no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]


@app.command("list", short_help="List queues.")
def list_queues(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """List queues: their binding keys and what lies in them."""
    outbox = find_outbox(outbox_name)
    queues = ask(outbox, outbox.backlog).queues
    if as_json:
        print_document({"queues": queues})
    elif queues:
        screen.show(queue_table(queues))
    else:
        screen.show(no_queue())


@app.command("remove", short_help="Remove a queue's bindings.")
def remove_queue(queue: Queue, as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Remove a queue's bindings, so that it gets no further messages.

    What lies in it stays, for a worker that listens on it. A worker that starts with such a listener, or a relay with
    such a route, binds it again.
    """
    outbox = find_outbox(outbox_name)
    removed, left = ask(outbox, lambda: _remove(outbox, queue))
    if not removed and left is None:
        raise Failure(ExitCode.WRONG, f"no queue is called {queue!r}; see: outbox queues list")
    if as_json:
        print_document({"queue": queue, "removed": removed, "left": left})
        return
    print(f"removed {words.count(removed, 'binding')} of {words.printable(queue)}")
    if left is not None and (left.delivered or left.retrying or left.dead):
        messages = words.count(left.delivered + left.retrying, "message")
        print(f"in it still: {messages}, {words.count(left.dead, 'dead letter')}")


@app.command("release", short_help="Forget which service a queue belongs to.")
def release_queue(queue: Queue, as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Forget which service a queue belongs to, after it was renamed or the queue was handed over.

    From then on it belongs to the service whose worker starts first.
    """
    outbox = find_outbox(outbox_name)
    service = ask(outbox, lambda: outbox.store.release(queue)) if queue else None
    if service is None:
        raise Failure(ExitCode.WRONG, f"no service is recorded for the queue {queue!r}")
    if as_json:
        print_document({"queue": queue, "service": service})
    else:
        print(f"{words.printable(queue)} does not belong to {words.printable(service)} any more")


async def _remove(outbox: Outbox, queue: str) -> tuple[int, QueueBacklog | None]:
    removed = await outbox.unbind(queue)
    backlog = await outbox.backlog()
    return removed, next((found for found in backlog.queues if found.queue == queue), None)


def no_queue() -> Text:
    """In place of the table. Where there is one destination without routes it stays like this."""
    return screen.note("no queue in the database: workers and relays with routes bind theirs when they start")


def queue_table(queues: Sequence[QueueBacklog]) -> Table:
    """Queues as status and `queues list` show them."""
    numbers = ("delivered", "retrying", "leased", "dead", "oldest")
    return screen.table(
        ("queue", "binding keys", *numbers),
        [
            (
                found.queue,
                ", ".join(found.binding_keys) or words.NOTHING,
                found.delivered,
                found.retrying,
                found.leased,
                found.dead,
                words.duration(found.oldest),
            )
            for found in queues
        ],
        numbers=numbers,
    )
