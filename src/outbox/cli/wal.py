"""`outbox wal`: the replication slot by which relays read PostgreSQL's write-ahead log."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox.cli import words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode
from outbox.cli.targets import AsJson, OutboxName, find_outbox
from outbox.core.log import SlotStatus
from outbox.core.printing import in_bytes

app = typer.Typer(help="Make, drop and check what relays with --from wal read.", no_args_is_help=True)

Recreate = Annotated[
    bool, typer.Option("--recreate", help="Drop the slot and make it again; messages that it missed are in the table.")
]
OnlySql = Annotated[bool, typer.Option("--sql", help="Print the statements instead, with the right that a role needs.")]
Role = Annotated[str, typer.Option(metavar="ROLE", help="The role in what --sql prints.")]


@app.command("create", short_help="Make the publication and the slot.")
def create(
    recreate: Recreate = False,
    sql: OnlySql = False,
    role: Role = "outbox_relay",
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """Make the publication and the replication slot of this table, as far as they are missing.

    Run it as a role that owns the table and has REPLICATION. The slot keeps the server's log from now on: a relay must
    read it, or the disk fills, unless max_slot_wal_keep_size is set. With --recreate a slot that was lost is made
    again, in the order in which no message is missed: first the slot, then what is in the table is left to the relay,
    then it streams. Stop the relays before.
    """
    outbox = find_outbox(outbox_name)
    if sql:
        statements = ask(outbox, lambda: outbox.wal.sql(role))
        print("\n".join(statements))
        return
    done = ask(outbox, lambda: outbox.wal.create(recreate=recreate))
    if as_json:
        print_document({"slot": outbox.wal.name, "done": done})
    else:
        print("\n".join(done) or f"the slot {outbox.wal.name} and its publication are there")


@app.command("drop", short_help="Drop the slot and the publication.")
def drop(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Drop the slot and the publication, and let relays poll the table again. Stop the relays before.

    Nothing is lost: what was not sent is in the table, where a relay that polls finds it.
    """
    outbox = find_outbox(outbox_name)
    done = ask(outbox, lambda: outbox.wal.drop())
    if as_json:
        print_document({"slot": outbox.wal.name, "done": done})
    else:
        print("\n".join(done) or "there is nothing to drop")


@app.command("status", short_help="Show the slot: who has it, and what it holds back.")
def status(as_json: AsJson = False, outbox_name: OutboxName = "") -> None:
    """Show who has the slot, who waits for it, and how much of the log the server keeps for it.

    Ends with 6 if no relay could read it.
    """
    outbox = find_outbox(outbox_name)
    found = ask(outbox, lambda: outbox.wal.status())
    if as_json:
        print_document(found)
    else:
        print("\n".join(lines(found)))
    if found.problems:
        raise typer.Exit(ExitCode.UNHEALTHY)


def lines(found: SlotStatus) -> list[str]:
    """A slot's status for people."""
    told = [f"slot {found.name}: {held_by(found)}"]
    if found.retained_bytes is not None:
        told.append(f"  log kept by the server: {in_bytes(found.retained_bytes)} ({found.wal_status})")
    if found.unconfirmed_bytes is not None:
        told.append(f"  log not confirmed yet: {in_bytes(found.unconfirmed_bytes)}")
    if found.exists:
        limit = "none: a relay that stands still fills the disk; set max_slot_wal_keep_size"
        if found.keep_size not in (None, "-1"):
            left = "" if found.safe_bytes is None else f", {in_bytes(max(0, found.safe_bytes))} left"
            limit = f"{found.keep_size}{left}"
        told.append(f"  limit of the log kept: {limit}")
        failover = {None: "this server cannot", True: "yes", False: "no"}[found.failover]
        told.append(f"  follows a failover: {failover}")
    told += [f"  problem: {words.printable(problem)}" for problem in found.problems]
    return told


def held_by(found: SlotStatus) -> str:
    """Who has a slot, in a few words."""
    if not found.exists:
        return "missing"
    waiting = f", {found.standbys} standing by" if found.standbys else ""
    if found.active_pid is None:
        return f"no relay has it{waiting}"
    return f"held by the relay at {words.printable(found.holder or 'an unknown address')}{waiting}"
