"""`outbox tables`: what the library keeps in a database."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from sqlalchemy import create_mock_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from outbox.cli import words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.settings import Settings
from outbox.stores.tables import Tables

app = typer.Typer(help="Make the tables, print their SQL.", no_args_is_help=True)


class Dialect(StrEnum):
    """Databases whose SQL can be printed."""

    POSTGRESQL = "postgresql"
    SQLITE = "sqlite"


OneDialect = Annotated[Dialect | None, typer.Option(help="Whose SQL. Without it, that of the configured database.")]
TransportName = Annotated[str, typer.Argument(metavar="NAME", help="The transport's name.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Even if messages lie in queues.")]


@app.command("create")
def create_tables(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Make the tables that are missing."""
    outbox = find_outbox(outbox_name)
    ask(outbox, outbox.create_tables, makes_file=True)
    names = [table.fullname for table in outbox.metadata.sorted_tables]
    if as_json:
        print_document({"tables": names})
    else:
        print("\n".join(["the tables are there:", *(f"  {name}" for name in names)]))


@app.command("sql", short_help="Print the SQL that makes the tables.")
def print_sql(dialect: OneDialect = None, outbox_name: OutboxName = "") -> None:
    """Print the SQL that makes the tables, for your own migrations. Nothing is connected to."""
    outbox = find_outbox(outbox_name)
    tables = _tables(outbox)
    print(_sql(tables, dialect or Dialect(outbox.engines.main.dialect.name)))


@app.command("switch-transport", short_help="Let another transport have the table.")
def switch_transport(
    name: TransportName, force: Force = False, as_json: AsJson = False, outbox_name: OutboxName = ""
) -> None:
    """Let another transport have the table. Stop the relays and workers of the one before first.

    Messages that already lie in queues of the database are not seen by a broker's relay: let workers finish them first.
    """
    if not name.isprintable() or " " in name or not 0 < len(name) <= 64:
        raise Failure(ExitCode.USAGE, f"{name!r}: a transport's name is one word")
    outbox = find_outbox(outbox_name)
    before = ask(outbox, lambda: _switch(outbox, name, force))
    if as_json:
        print_document({"table": outbox.tables.messages.fullname, "transport": name, "before": before})
    elif before == name:
        print(f"{outbox.tables.messages.fullname} belongs to the transport {name}")
    else:
        print(f"{outbox.tables.messages.fullname} belongs to the transport {name} now; before it was {before}")


async def _switch(outbox: Outbox, name: str, force: bool) -> str:
    before = await outbox.store.record_transport(name)
    if before == name:
        return before
    backlog = await outbox.backlog()
    queued = sum(queue.delivered + queue.retrying for queue in backlog.queues)
    if queued and not force:
        raise Failure(
            ExitCode.WRONG,
            f"{words.count(queued, 'message lies', 'messages lie')} in queues of the database, where {name} would not "
            "look for them: let workers finish them first, or add --force",
        )
    await outbox.store.record_transport(name, switch=True)
    return before


def _tables(outbox: Outbox) -> Tables:
    try:
        return outbox.tables
    except ConfigurationError:  # no database is named, and none is needed
        settings = Settings.of({})
        return Tables.named(settings.table_name, settings.schema)


def _sql(tables: Tables, dialect: Dialect) -> str:
    statements: list[Any] = []
    engine = create_mock_engine(f"{dialect}://", lambda statement, *_: statements.append(statement))
    for table in tables.metadata.sorted_tables:
        begun = len(statements)
        table.create(engine, checkfirst=False)
        # The indexes come in the order of a set; a file under version control wants the same one each time.
        statements[begun:] = sorted(statements[begun:], key=_place)
    return "\n\n".join(_text(statement.compile(dialect=engine.dialect)) for statement in statements)


def _place(statement: Any) -> tuple[int, str]:
    """The table first, its indexes by name, then its settings."""
    if isinstance(statement, CreateTable):
        return 0, ""
    return (1, str(statement.element.name)) if isinstance(statement, CreateIndex) else (2, "")


def _text(compiled: object) -> str:
    return "\n".join(line.rstrip() for line in str(compiled).strip().splitlines()).expandtabs(4) + ";"
