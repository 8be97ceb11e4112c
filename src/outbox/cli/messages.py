"""`outbox messages`: what is stored, and the walk of each message."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from outbox.cli import screen, words
from outbox.cli.asking import ask
from outbox.cli.documents import document, print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.message import Message
from outbox.core.states import DELIVERED, State, in_state
from outbox.core.store import IN_DATABASE, StoredMessage
from outbox.core.transport import countable
from outbox.instance import Outbox

app = typer.Typer(help="List stored messages, or show the history of one.", no_args_is_help=True)

Fact = tuple[str, object]

UNROUTABLE = "unroutable"
GONE = "those that were handled are deleted unless clean_up_after keeps them"

_HISTORY = re.compile(r"(?P<when>\S+ \S+Z) (?P<what>attempt \d+|unroutable|replayed|given up)(?P<how>.*)")


def state_name(text: str) -> str:
    """A state's name. The help does not show the one of 0.1, which is accepted all the same."""
    if text not in (DELIVERED, *State):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, map(str, State)))}.")
    return text


Limit = Annotated[int, typer.Option(min=1, help="At most this many.")]
After = Annotated[int, typer.Option(min=0, help="Continue after this id, the last one of the previous list.")]
WithBody = Annotated[bool, typer.Option("--body", help="Show the body too, as text or else in base64.")]
OneState = Annotated[
    str | None, typer.Option(parser=state_name, metavar=f"<{'|'.join(State)}>", help="Only those in this state.")
]
OneQueue = Annotated[str | None, typer.Option(help="Only those of this queue.")]
MessageId = Annotated[
    str, typer.Argument(metavar="MESSAGE_ID", help="The message's id, its last tracking id.", show_default=False)
]


@app.command("list", short_help="List stored messages.")
def list_messages(
    state: OneState = None,
    queue: OneQueue = None,
    limit: Limit = 50,
    after: After = 0,
    with_body: WithBody = False,
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """List stored messages, oldest first, a line for each queue that a message is in. Dead letters are left out."""
    outbox = find_outbox(outbox_name)
    found, deprecated = ask(
        outbox, lambda: in_state(outbox.store.inspection, state, queue=queue, limit=limit, after=after)
    )
    if deprecated is not None:
        screen.show(screen.note(deprecated), on=screen.console(sys.stderr))
    next_after = str(found[-1].row_id) if len(found) == limit else None
    if as_json:
        print_document({"messages": found, "next_after": next_after}, with_body=with_body)
    elif not found:
        screen.show(screen.note(f"no message; {_gone(outbox)}"))
    else:
        _show_list(found, with_body)
        if next_after is not None:
            screen.show(screen.note(f"there may be more: --after {next_after}"))


@app.command("show", short_help="Show a message's history.")
def show_message(
    message_id: MessageId, with_body: WithBody = False, as_json: AsJson = False, outbox_name: OutboxName = ""
) -> None:
    """Show a message's history: emitted, due, routed, each failed attempt, and where it is now, for every queue."""
    outbox = find_outbox(outbox_name)
    places = ask(outbox, lambda: outbox.find(message_id))
    if not places:
        raise Failure(
            ExitCode.WRONG,
            f"no message has the id {message_id!r}; {_gone(outbox)}",
        )
    if as_json:
        without_message = [
            {name: value for name, value in document(place).items() if name != "message"} for place in places
        ]
        print_document({"message": places[0].message, "places": without_message}, with_body=with_body)
    else:
        _show_walk(places, with_body)


def _gone(outbox: Outbox) -> str:
    """Why a message that was emitted may not be here."""
    transport = outbox.transport
    if transport.name == IN_DATABASE:
        return GONE
    counted = ", and may wait there: see outbox queues list" if countable(transport) else ""
    return f"those that were handed to {transport.name} are deleted here unless clean_up_after keeps them{counted}"


def _show_list(found: Sequence[StoredMessage], with_body: bool) -> None:
    columns = ["message", "state", "routing key", "queue", *(["body"] if with_body else [])]
    rows = [
        (
            place.message.id,
            place.state,
            place.message.routing_key,
            place.queue or words.NOTHING,
            *([words.body(place.message.body)[0]] if with_body else []),
        )
        for place in found
    ]
    screen.show(screen.table(columns, rows, whole=("message", "state")))


def _show_walk(places: Sequence[StoredMessage], with_body: bool) -> None:
    message = places[0].message
    screen.show(screen.heading(f"{message.routing_key}  {message.id}"), screen.facts(emitted(message, with_body)))
    for place in places:
        where = f"in queue {place.queue}" if place.queue else "in the outbox"
        screen.show("", screen.heading(where), screen.facts(_walk(place)))


def emitted(message: Message, with_body: bool) -> Iterator[Fact]:
    """What was said when the message was emitted."""
    yield "emitted", words.moment(message.created_at)
    if message.key is not None:
        yield "key", message.key
    if len(message.tracking_ids) > 1:
        yield "tracking", screen.several_lines("\n".join(map(words.printable, message.tracking_ids)))
    for name, value in message.headers.items():
        yield "header", f"{name}: {value}"
    yield "body", f"{words.count(len(message.body), 'byte')}, {message.content_type}"
    if message.expires_at is not None:
        yield "expires", words.moment(message.expires_at)
    if with_body:
        text, encoding = words.body(message.body)
        yield "" if encoding == "text" else encoding, screen.several_lines(text)


def _walk(place: StoredMessage) -> Iterator[Fact]:
    """One place's part of the walk, in the order in which it happened."""
    history = [attempt_fact(line) for line in place.history.splitlines()]
    if place.timer_id is not None:
        yield "timer", place.timer_id
    if place.attempt_count <= (place.state in (State.SENT, State.HANDLED)) and not history:
        yield "due", words.moment(place.due_at)  # after a failure it tells when the next attempt is
    yield from (fact for fact in history if fact[0] == UNROUTABLE)
    if place.routed_at is not None:
        yield "routed", words.moment(place.routed_at)
    yield from (fact for fact in history if fact[0] != UNROUTABLE)
    if place.crash_count:
        yield "crashed", f"{words.count(place.crash_count, 'attempt')} never ended: the worker died or lost its lease"
    if place.leased_until is not None:
        yield "leased", f"until {words.moment(place.leased_until)}"
    yield "now", _now(place)
    if place.error:
        yield "error", screen.several_lines(place.error)


def attempt_fact(line: str) -> Fact:
    """A line of a history: `2025-01-01 12:00:00Z attempt 1 failed: why` is about attempt 1."""
    found = _HISTORY.fullmatch(line)
    return (found["what"], f"{found['when']}{found['how']}") if found else ("", line)


def _now(place: StoredMessage) -> str:
    attempts = words.count(place.attempt_count, "attempt")
    match State(place.state) if place.state != "dead" else place.state:
        case State.WAITING:
            return "waiting for a relay or worker"
        case State.UNROUTABLE:
            again = words.moment(place.due_at)
            return f"unroutable: no queue is bound to {place.message.routing_key}; looked at again {again}"
        case State.QUEUED:
            return "queued, waiting for its first attempt" if place.leased_until is None else "being handled"
        case State.RETRYING:
            return f"retrying after {attempts}, the next is due {words.moment(place.due_at)}"
        case State.SENT | State.HANDLED:
            done = words.moment(place.done_at) if place.done_at else ""
            return f"{place.state} {done}, after {attempts}"
        case _:
            died = words.moment(place.done_at) if place.done_at else ""
            return f"dead letter {place.row_id} since {died}, after {attempts}: {place.reason}"
