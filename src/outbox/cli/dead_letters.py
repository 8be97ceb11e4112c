"""`outbox dead-letters`: messages that are no longer tried, until they are replayed or discarded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from outbox.cli import screen, words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.messages import After, Limit, WithBody, attempt_fact, emitted
from outbox.cli.progress import Progress
from outbox.cli.selecting import NAMES, selecting
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.dead_letter import DeadLetter, DeadLetters, Filter
from outbox.core.errors import NotFound
from outbox.instance import Outbox

EVERYTHING = 2**31 - 1  # dead letters of one list
BATCH = 500  # dead letters in one statement
STEPS_PER_SECOND = 10  # how finely a rate is spread
MOST_SHOWN = 20  # dead letters that are listed before they are deleted; more are counted

app = typer.Typer(help="List, show, replay and discard dead letters.", no_args_is_help=True)

Id = Annotated[
    int, typer.Argument(metavar="ID", help="The dead letter's id, as the list shows it.", show_default=False)
]
Ids = Annotated[
    list[int] | None, typer.Argument(metavar="[ID]...", help="Ids, as the list shows them.", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help="All of them, or all that the other options choose.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count them; change nothing.")]
Rate = Annotated[float | None, typer.Option(min=0.01, metavar="NUMBER", help="At most this many per second.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@dataclass(frozen=True)
class Choice:
    """Which dead letters a command is about: some by their ids, or all that the filters choose."""

    ids: Sequence[int]
    filter: Filter

    @classmethod
    def of(cls, ids: Sequence[int] | None, everything: bool, filter: Filter) -> Choice:
        """What the arguments say; a usage error where they say two things, or nothing."""
        if ids and (everything or filter != Filter()):
            raise Failure(ExitCode.USAGE, f"give ids, or --all with {NAMES}, not both")
        if not ids and not everything:
            raise Failure(ExitCode.USAGE, f"give ids, or --all; {NAMES} choose among --all")
        return cls(tuple(dict.fromkeys(ids or ())), replace(filter, limit=EVERYTHING))

    async def found(self, dead_letters: DeadLetters) -> list[DeadLetter]:
        """The chosen ones, all of them looked up before any is touched: one that dies again is not chosen again."""
        if not self.ids:
            return await dead_letters.chosen(self.filter)
        found = []
        for id in self.ids:
            try:
                found.append(await dead_letters.show(id))
            except NotFound:
                continue
        return found


@app.command("list")
@selecting
def list_dead_letters(
    filter: Filter,
    limit: Limit = 50,
    after: After = 0,
    with_body: WithBody = False,
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """List dead letters, oldest first."""
    outbox = find_outbox(outbox_name)
    filter = replace(filter, limit=limit, after=after)
    found = ask(outbox, lambda: outbox.dead_letters.chosen(filter))
    next_after = str(found[-1].id) if len(found) == limit else None
    if as_json:
        print_document({"dead_letters": found, "next_after": next_after}, with_body=with_body)
    elif not found:
        screen.show(screen.note("no dead letter"))
    else:
        _show_list(found, with_body)
        if next_after is not None:
            screen.show(screen.note(f"there may be more: --after {next_after}"))


@app.command("show", short_help="Show one dead letter.")
def show_dead_letter(
    id: Id, with_body: WithBody = False, as_json: AsJson = False, outbox_name: OutboxName = ""
) -> None:
    """Show one dead letter: the message, its failed attempts, and why it is dead."""
    outbox = find_outbox(outbox_name)
    letter = ask(outbox, lambda: outbox.dead_letters.show(id))
    if as_json:
        print_document(letter, with_body=with_body)
        return
    message = letter.message
    screen.show(
        screen.heading(f"dead letter {letter.id}: {message.routing_key}  {message.id}"),
        screen.facts(emitted(message, with_body)),
        "",
        screen.heading(f"died in queue {letter.queue}" if letter.queue else "died before it reached a queue"),
        screen.facts(
            [
                *(attempt_fact(line) for line in letter.history.splitlines()),
                ("died", words.moment(letter.died_at)),
                ("reason", f"{letter.reason}, after {words.count(letter.attempt_count, 'attempt')}"),
                *([("crashed", words.count(letter.crash_count, "time"))] if letter.crash_count else []),
                ("error", screen.several_lines(letter.error or words.NOTHING)),
            ]
        ),
    )


@app.command("replay", short_help="Replay dead letters.")
@selecting
def replay_dead_letters(
    ids: Ids = None,
    everything: All = False,
    *,
    filter: Filter,
    dry_run: DryRun = False,
    rate: Rate = None,
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """Replay dead letters, each in the queue where it died, with fresh attempts."""
    choice = Choice.of(ids, everything, filter)
    outbox = find_outbox(outbox_name)
    letters = ask(outbox, lambda: choice.found(outbox.dead_letters))
    replayed = 0
    if letters and not dry_run:
        replayed = ask(outbox, lambda: _replay(outbox, [letter.id for letter in letters], rate))
    _tell(choice, letters, "replayed", replayed, dry_run, as_json)


@app.command("discard")
@selecting
def discard_dead_letters(
    ids: Ids = None,
    everything: All = False,
    *,
    filter: Filter,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """Delete dead letters for good. Asks for confirmation; without a terminal it needs --yes."""
    choice = Choice.of(ids, everything, filter)
    may_ask = sys.stdin.isatty() and not as_json
    if not (yes or dry_run or may_ask):
        raise Failure(ExitCode.USAGE, "discarding cannot be undone and there is no terminal to confirm it: add --yes")
    outbox = find_outbox(outbox_name)
    letters = ask(outbox, lambda: choice.found(outbox.dead_letters))
    if letters and not (yes or dry_run):
        (_show_list if len(letters) <= MOST_SHOWN else _show_counts)(letters)
        typer.confirm(f"Delete {_count(letters)} for good?", abort=True)
    discarded = 0
    if letters and not dry_run:
        discarded = ask(outbox, lambda: _discard(outbox, [letter.id for letter in letters]))
    _tell(choice, letters, "discarded", discarded, dry_run, as_json)


async def _replay(outbox: Outbox, ids: Sequence[int], rate: float | None) -> int:
    """Replay in batches; with a rate, small ones, each at its time."""
    size = BATCH if rate is None else max(1, min(BATCH, round(rate / STEPS_PER_SECOND)))
    began, replayed = time.monotonic(), 0
    with Progress(len(ids), "replayed") as progress:
        for start in range(0, len(ids), size):
            if rate is not None:
                await asyncio.sleep(began + start / rate - time.monotonic())
            replayed += await outbox.dead_letters.replay(ids[start : start + size])
            progress.show(min(start + size, len(ids)))
    return replayed


async def _discard(outbox: Outbox, ids: Sequence[int]) -> int:
    return sum([await outbox.dead_letters.discard(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)])


def _tell(choice: Choice, letters: Sequence[DeadLetter], done: str, number: int, dry_run: bool, as_json: bool) -> None:
    """Say what was done. Less than what was asked for is not fine."""
    ids = [letter.id for letter in letters]
    missing = [id for id in choice.ids if id not in ids]
    if as_json:
        named = {"ids": list(map(str, ids)), "not_found": list(map(str, missing))}
        print_document({**named, done: number, "dry_run": dry_run})
    elif dry_run and letters:
        _show_counts(letters)
        print(f"{_count(letters)} would be {done}")
    elif letters:
        print(f"{done} {words.count(number, 'dead letter')}")
    if missing:
        raise Failure(ExitCode.WRONG, f"no dead letter has the id {', '.join(map(str, missing))}")
    if not letters:
        raise Failure(ExitCode.WRONG, f"no dead letter matches: nothing was {done}")
    if number < len(letters) and not dry_run:
        left = f"{len(letters) - number} of them were not {done}"
        raise Failure(ExitCode.WRONG, f"{left}: another command took them meanwhile, or they cannot be read")


def _show_list(letters: Sequence[DeadLetter], with_body: bool = False) -> None:
    rows = [
        (
            letter.id,
            letter.queue or words.NOTHING,
            letter.reason,
            letter.message.routing_key,
            words.moment(letter.died_at),
            words.first_line(letter.error) or words.NOTHING,
            *([words.body(letter.message.body)[0]] if with_body else []),
        )
        for letter in letters
    ]
    columns = ["id", "queue", "reason", "routing key", "died", "error", *(["body"] if with_body else [])]
    screen.show(screen.table(columns, rows, numbers=("id",), whole=("reason",)))


def _show_counts(letters: Sequence[DeadLetter]) -> None:
    counted = Counter((letter.queue or words.NOTHING, letter.reason, letter.message.routing_key) for letter in letters)
    rows = [(count, *which) for which, count in counted.most_common(MOST_SHOWN)]
    screen.show(screen.table(["count", "queue", "reason", "routing key"], rows, numbers=("count",), whole=("reason",)))
    if len(counted) > MOST_SHOWN:
        left = len(letters) - sum(count for count, *_ in rows)
        screen.show(screen.note(f"and {left} of {words.count(len(counted) - MOST_SHOWN, 'other kind')}"))


def _count(letters: Sequence[DeadLetter]) -> str:
    return words.count(len(letters), "dead letter")
