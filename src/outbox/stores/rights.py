"""Rights: what each kind of process needs to do with the tables, and nothing beyond it."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Table

from outbox.stores.tables import Tables

ROLES = {
    "producer": "emits",
    "relay": "routes messages or hands them to the transport, and cleans up",
    "worker": "does what a relay does, and serves listeners",
    "operator": "runs the other commands: status, messages, dead-letters, queues, tables, doctor",
}

# What changes on a message's way. The message itself, from its routing key to its body, does not.
CHANGING = (
    "done_at",
    "lease_until",
    "lease_token",
    "unroutable",
    "due_at",
    "first_due_at",
    "routed_at",
    "attempts",
    "starts",
    "destination",
    "history",
)


class Right(NamedTuple):
    """Rights on a table, some of them on single columns only."""

    rights: str
    table: Table


def rights_of(tables: Tables, kind: str) -> list[Right]:
    """The rights of one kind of process, but for what a producer writes."""
    changes = f"UPDATE ({', '.join(CHANGING)})"
    # Locking a row asks for the right to update, be it of a single column.
    works = [
        Right(f"SELECT, INSERT, DELETE, {changes}", tables.messages),
        Right("INSERT", tables.dead_letters),
        Right("SELECT, INSERT, UPDATE (state, failures, paused_until, error, refusing_since)", tables.circuits),
        Right("SELECT, INSERT", tables.owners),
    ]
    match kind:
        case "producer":
            return [Right("SELECT (id, asleep_until)", tables.state)]
        case "relay":
            inbox = "SELECT, DELETE, UPDATE (entered_at)"
            state = "SELECT, INSERT, UPDATE (transport, asleep_until)"
            others = [Right("SELECT", tables.bindings), Right(inbox, tables.inbox), Right(state, tables.state)]
            return [*works, *others]
        case "worker":
            inbox = "SELECT, INSERT, DELETE, UPDATE (entered_at)"
            state = "SELECT, INSERT, UPDATE (transport, bindings_version, asleep_until)"
            others = [Right("SELECT, INSERT", tables.bindings), Right(inbox, tables.inbox), Right(state, tables.state)]
            return [*works, *others]
        case _:
            return [
                Right("SELECT, INSERT", tables.messages),
                Right("SELECT, DELETE, UPDATE (died_at)", tables.dead_letters),
                Right("SELECT, DELETE", tables.bindings),
                Right("SELECT", tables.circuits),
                Right("SELECT, DELETE", tables.owners),
                Right("SELECT, INSERT, UPDATE (transport, bindings_version)", tables.state),
            ]
