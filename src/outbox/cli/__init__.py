"""The command line: `outbox`, with a file for each noun it speaks of."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outbox.cli import dead_letters, demo, doctor, messages, queues, relay, status, tables, topology, wal, worker
from outbox.cli.exits import ExitCode, in_words, reported
from outbox.cli.secrets import redacted
from outbox.cli.words import lines


class Commands(TyperGroup):
    """The commands, with the library's errors told as a line and a code."""

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


app = typer.Typer(
    name="outbox",
    cls=Commands,
    epilog=in_words(),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("transactional-outbox"))
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


@app.callback()
def outbox(show_version: Version = False) -> None:
    """A transactional outbox and inbox.

    Every setting is read from the environment: OUTBOX_DB_ENGINE_URL says where the database is.
    """


app.command(short_help="Hand stored messages to the transport.")(relay.relay)
app.command(short_help="Serve listeners.")(worker.worker)
app.command(short_help="Show what lies where.")(status.status)
app.command(short_help="Say what is wrong, and what to do.")(doctor.doctor)
app.add_typer(messages.app, name="messages")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(queues.app, name="queues")
app.add_typer(tables.app, name="tables")
app.add_typer(wal.app, name="wal")
app.command(short_help="Print what listeners need at RabbitMQ.")(topology.topology)
app.command(short_help="Show the library at work, on SQLite.")(demo.demo)


def main() -> None:
    """The entry point of the `outbox` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not every terminal knows every sign
    try:
        app()
    except Exception:  # noqa: BLE001 - a mistake of ours: its traceback may be shown, credentials may not
        print(lines(redacted(traceback.format_exc())), file=sys.stderr)
        sys.exit(ExitCode.WRONG)
