"""`outbox tables`: what the library keeps in a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from sqlalchemy import URL

from outbox.adapters import installed_stores, installed_transports, store_class
from outbox.cli import words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.errors import ConfigurationError
from outbox.core.store import TRANSPORT, Difference
from outbox.instance import Outbox
from outbox.settings import Settings
from outbox.stores.ddl import creation

app = typer.Typer(help="Create the tables, check them, print their SQL.", no_args_is_help=True)


Dialect = StrEnum("Dialect", [(name.upper(), name) for name in installed_stores()])  # type: ignore[misc]
OneDialect = Annotated[Dialect | None, typer.Option(help="The SQL dialect. Default: that of the configured database.")]
Roles = Annotated[bool, typer.Option("--roles", help="The roles and their rights instead of the tables.")]
RolePrefix = Annotated[str, typer.Option(metavar="PREFIX", help="What the names of the roles begin with.")]
TransportName = Annotated[str, typer.Argument(metavar="NAME", help="The transport's name.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Even if there are messages in queues.")]


@app.command("create")
def create_tables(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Create the tables that are missing."""
    outbox = find_outbox(outbox_name)
    ask(outbox, outbox.create_tables, makes_file=True)
    names = [table.fullname for table in outbox.metadata.sorted_tables]
    if as_json:
        print_document({"tables": names})
    else:
        print("\n".join(["the tables are there:", *(f"  {name}" for name in names)]))


@app.command("check", short_help="Compare the tables with those that this version needs.")
def check_tables(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Compare the existing tables with those that this version needs.

    Prints a line for each difference and the SQL that fixes it, and ends with 6 if there is any. Columns and indexes
    that you added are fine. It reads the database's catalogs and writes nothing.
    """
    outbox = find_outbox(outbox_name)
    differences = ask(outbox, outbox.check_tables, needs_tables=False)
    if as_json:
        print_document({"differences": differences})
    elif differences:
        print("\n\n".join(_as_script(differences)))
    else:
        print("the tables are as this version needs them")
    if differences:
        raise typer.Exit(ExitCode.UNHEALTHY)


@app.command("sql", short_help="Print the SQL that creates the tables.")
def print_sql(
    dialect: OneDialect = None, roles: Roles = False, role_prefix: RolePrefix = "outbox", outbox_name: OutboxName = ""
) -> None:
    """Print the SQL that creates the tables, for your own migrations. No connection is opened.

    With --roles, print the SQL that makes roles for producers, relays, workers and operators instead, each with the
    rights that it needs. SQLite has no roles.
    """
    outbox = find_outbox(outbox_name)
    chosen = outbox.engines.main.dialect.name if dialect is None else str(dialect)
    store = store_class(chosen)
    tables = store.tables_named(*_names(outbox))
    if not roles:
        found = URL.create(chosen).get_dialect()()
        print("\n\n".join(statement for table in tables.metadata.sorted_tables for statement in creation(table, found)))
        return
    script = store.roles_sql(tables, role_prefix)
    if script is None:
        raise Failure(ExitCode.USAGE, f"{chosen} knows no roles: --roles is for servers, such as --dialect postgresql")
    print(script)


@app.command("switch-transport", short_help="Switch the table to another transport.")
def switch_transport(
    name: TransportName, force: Force = False, as_json: AsJson = False, outbox_name: OutboxName = ""
) -> None:
    """Switch the table to another transport, or to the same one with another address. Stop relays and workers first.

    A broker's relay does not see messages that are already in queues of the database: let workers finish them first, or
    afterwards, with outbox worker --leftovers. All others go by the new transport. Messages that were unroutable before
    are due at once.
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
    await _check_transport(outbox, name)
    before = await outbox.store.maintenance.record_transport(name)
    if before == name:
        await outbox.store.owners.release(TRANSPORT)  # it may have another address from now on
        return before
    backlog = await outbox.store.inspection.backlog()
    queued = sum(queue.open for queue in backlog.queues)
    if queued and not force:
        raise Failure(
            ExitCode.WRONG,
            f"{words.count(queued, 'message lies', 'messages lie')} in queues of the database, where {name} would not "
            "look for them: let workers finish them first, or add --force and serve them afterwards with "
            "outbox worker --leftovers",
        )
    await outbox.store.maintenance.record_transport(name, switch=True)
    return before


async def _check_transport(outbox: Outbox, name: str) -> None:
    """Refuse a name that no process could come with: none would start any more."""
    installed = installed_transports()
    if name in installed or name in (outbox.transport.name, await outbox.store.maintenance.recorded_transport()):
        return
    known = ", ".join(sorted(installed))
    raise Failure(
        ExitCode.USAGE,
        f"no transport is called {name!r}; there are: {known}. One of your own is known where it is installed, or with "
        "--outbox, if that Outbox has it",
    )


def _as_script(differences: Sequence[Difference]) -> Iterator[str]:
    """What differs as comments of SQL, so that it can be run as it stands."""
    for mend in dict.fromkeys(difference.mend for difference in differences):
        found = [difference for difference in differences if difference.mend == mend]
        yield "\n".join([*(f"-- {each.table}: {words.printable(each.what)}" for each in found), mend])


def _names(outbox: Outbox) -> tuple[str, str | None]:
    """The name of the table, and that of the schema."""
    try:
        settings = outbox.settings
    except ConfigurationError:  # no database is named, and none is needed
        settings = Settings.of({})
    return settings.table_name, settings.schema
