"""`outbox status`: how many messages are in which state and queue, and their rates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from sqlalchemy.exc import SQLAlchemyError

from outbox.cli import screen, words
from outbox.cli.asking import ask, explained
from outbox.cli.documents import document, print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.logs import hush_clients
from outbox.cli.queues import counted_transport, queue_parts
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.cli.wal import held_by
from outbox.core.log import SlotStatus
from outbox.core.printing import in_bytes
from outbox.core.store import IN_DATABASE, Backlog, Circuit, CircuitState
from outbox.instance import Outbox
from outbox.shutdown import Shutdown, on_signals


@dataclass(frozen=True)
class Condition:
    """How the destination of a transport is, where that can be asked."""

    name: str
    trouble: str | None  # why it takes no messages


@dataclass(frozen=True)
class Rates:
    """Rows per second between two looks.

    In: rows written to the messages table; a message for three queues is three rows, a replay is one. Out: rows that
    were settled meanwhile, that is those written less those by which the open ones became more: handled, sent, dead,
    cancelled. On PostgreSQL a row whose transaction rolled back counts in both.
    """

    rows_in_per_second: float
    rows_out_per_second: float
    seconds: float

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Rates:
        seconds = max((after.at - before.at).total_seconds(), 0.001)
        written = after.backlog.rows_written - before.backlog.rows_written
        settled = written - (after.open_rows - before.open_rows)
        return cls(max(0, written) / seconds, max(0, settled) / seconds, seconds)


@dataclass(frozen=True)
class Snapshot:
    """The backlog at one moment."""

    at: datetime
    backlog: Backlog
    condition: Condition | None = None  # of the transport
    slot: SlotStatus | None = None  # by which relays read the log, if they do

    @property
    def open_rows(self) -> int:
        queued = sum(queue.open for queue in self.backlog.queues if queue.transport == IN_DATABASE)
        return self.backlog.waiting + self.backlog.unroutable + queued


@dataclass(frozen=True)
class Status:
    """What a look found, with the rates since the one before it."""

    table: str
    look: Snapshot
    countable: str | None = None  # the transport, if it has queues of its own
    rates: Rates | None = None
    trouble: str = ""  # why there is no newer look


Asking = Callable[[], Awaitable[Condition | None]]

Watch = Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")]
Interval = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="Time between two measurements. 0: a single one, without rates.")
]


def status(
    watch: Watch = False, interval: Interval = 1.0, as_json: AsJson = False, outbox_name: OutboxName = ""
) -> None:
    """Show how many messages wait, are due, and are in each queue.

    Rates come from two measurements. In: rows written to the table per second, where a message for three queues is
    three rows. Out: rows settled per second, that is handled, sent, dead or cancelled. On PostgreSQL a row whose
    transaction rolled back counts in both.

    With --watch --json each measurement is one document on one line.
    """
    hush_clients()
    outbox = find_outbox(outbox_name)
    if watch:
        ask(outbox, lambda: _watch(outbox, max(interval, 0.1), as_json))
        return
    found = ask(outbox, lambda: _twice(outbox, interval))
    if as_json:
        print_document(_document(found))
    else:
        screen.show(*_parts(found))


async def _twice(outbox: Outbox, interval: float) -> Status:
    async with _watched(outbox) as condition:
        first = await _look(outbox, condition)
        if not interval:
            return Status(_table(outbox), first, counted_transport(outbox))
        await asyncio.sleep(interval)
        second = await _look(outbox, condition)
        return Status(_table(outbox), second, counted_transport(outbox), Rates.between(first, second))


async def _watch(outbox: Outbox, interval: float, as_json: bool) -> None:
    console = screen.console()
    with on_signals() as shutdown:
        async with _watched(outbox) as condition:
            looks = _looks(outbox, condition, interval, shutdown)
            if as_json:
                async for found in looks:
                    print_document(_document(found), compact=True)
            elif console.is_terminal:
                await _fill_screen(console, looks)
            else:
                async for found in looks:
                    screen.show(*_parts(found), "")


async def _fill_screen(console: Console, looks: AsyncIterator[Status]) -> None:
    """A screen of its own while it lasts; what was seen last stays behind."""
    found: Status | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for found in looks:
            live.update(Group(*_parts(found)), refresh=True)
    if found is not None:
        screen.show(*_parts(found))


async def _looks(outbox: Outbox, condition: Asking, interval: float, shutdown: Shutdown) -> AsyncIterator[Status]:
    """Looks until a signal. A database that goes away later than at the first one is waited for."""
    before = await _look(outbox, condition)
    found = Status(_table(outbox), before, counted_transport(outbox))
    while not shutdown.begun.is_set():
        yield found
        with suppress(TimeoutError):
            await asyncio.wait_for(shutdown.begun.wait(), interval)
        try:
            after = await _look(outbox, condition)
        except (SQLAlchemyError, OSError) as error:
            failure = explained(error, outbox)
            if failure.code != ExitCode.UNREACHABLE:
                raise Failure(failure.code, failure.line) from None
            found = Status(found.table, before, found.countable, trouble=failure.line)
        else:
            found = Status(found.table, after, found.countable, Rates.between(before, after))
            before = after


async def _look(outbox: Outbox, condition: Asking) -> Snapshot:
    asking = asyncio.ensure_future(condition())  # beside it: each waits for a silent broker
    try:
        return Snapshot(datetime.now(UTC), await outbox.backlog(), await asking, await slot_status(outbox))
    finally:
        asking.cancel()


async def slot_status(outbox: Outbox) -> SlotStatus | None:
    """How the replication slot is, where relays read the log or are to."""
    reads_log = outbox.engines.configured and (outbox.settings.relay_from == "wal" or await outbox.store.owners.feeds())
    return await outbox.wal.status() if reads_log else None


@asynccontextmanager
async def _watched(outbox: Outbox) -> AsyncIterator[Asking]:
    """How to ask for the condition of the transport; None is the answer where it is not known."""

    async def asked() -> Condition | None:
        return None if trouble is None else Condition(transport.name, await trouble())

    transport = outbox.transport
    async with AsyncExitStack() as stack:
        trouble = await stack.enter_async_context(transport.watched()) if transport.features.knows_health else None
        yield asked


def _table(outbox: Outbox) -> str:
    return outbox.tables.messages.fullname


def _document(found: Status) -> dict[str, object]:
    backlog: dict[str, object] = document(found.look.backlog)
    return {
        "at": found.look.at,
        "table": found.table,
        **backlog,
        "rates": found.rates,
        "transport": found.look.condition,
        "slot": found.look.slot,
        "trouble": found.trouble or None,
    }


def _parts(found: Status) -> list[RenderableType]:
    backlog = found.look.backlog
    parts: list[RenderableType] = [
        screen.heading(f"{found.table}  {words.moment(found.look.at)}"),
        screen.facts(
            [
                ("waiting", _waiting(backlog)),
                ("oldest due", words.duration(backlog.oldest)),
                ("leased", words.UNKNOWN if backlog.leased is None else backlog.leased),
                ("unroutable", f"{backlog.unroutable}, no queue is bound to them" if backlog.unroutable else 0),
                ("sent", f"{backlog.sent}, kept by clean_up_after" if backlog.sent else 0),
                ("handled", f"{backlog.handled}, kept by clean_up_after" if backlog.handled else 0),
                ("dead", _dead(backlog)),
                ("rows", _rates(found.rates)),
                *_transport(found.look.condition),
                *_slot(found.look.slot),
                *(("circuit", _outage(circuit)) for circuit in backlog.circuits if circuit.failures),
            ]
        ),
        "",
    ]
    if found.trouble:
        parts.insert(1, screen.heading(f"{found.trouble}; this is what was seen last"))
    parts += queue_parts(backlog, found.countable)
    return parts


def _waiting(backlog: Backlog) -> str:
    refused = f"; {backlog.refused} refused, the first for {words.duration(backlog.refused_for)}"
    due = f"{backlog.waiting}, {backlog.due} of them due{refused if backlog.refused else ''}"
    return due if backlog.waiting else "0"


def _dead(backlog: Backlog) -> str:
    if backlog.dead == 0:
        return "0"
    reasons = ", ".join(f"{count} {reason}" for reason, count in backlog.dead_by_reason.items())
    if backlog.dead is None:
        known = reasons or f"0 in {IN_DATABASE}"
        return f"{words.UNKNOWN}, because not all queues can be counted; known: {known}"
    return f"{backlog.dead} ({reasons}), see outbox dead-letters list"


def _outage(circuit: Circuit) -> str:
    place = circuit.destination or "the destination"
    pause = f" for {words.duration(circuit.remaining)}" if circuit.state is CircuitState.OPEN else ""
    tried = f"no answer {words.count(circuit.failures, 'time')}"
    if circuit.refusing is not None:
        tried = f"nothing taken for {words.duration(circuit.refusing)}"
    return f"{place}: {circuit.state}{pause}, {tried}: {words.first_line(circuit.error)}"


def _transport(condition: Condition | None) -> list[tuple[str, str]]:
    if condition is None:
        return []
    return [("transport", f"{condition.name}: {condition.trouble or 'takes messages'}")]


def _slot(found: SlotStatus | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    kept = "" if found.retained_bytes is None else f", {in_bytes(found.retained_bytes)} of the log kept"
    trouble = f"; {words.first_line(found.problems[0])}" if found.problems else ""
    return [("slot", f"{found.name}: {held_by(found)}{kept}{trouble}")]


def _rates(rates: Rates | None) -> str:
    if rates is None:
        return words.NOTHING
    return f"{rates.rows_in_per_second:.1f} in, {rates.rows_out_per_second:.1f} out, per second"
