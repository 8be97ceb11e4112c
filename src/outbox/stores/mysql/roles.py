"""Roles of MariaDB and MySQL: for each kind of process the rights that it needs, and no further one."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Table
from sqlalchemy.dialects import mysql

from outbox.stores.rights import ROLES, rights_of
from outbox.stores.rows import EMITTED
from outbox.stores.tables import Tables, check_identifier

LONGEST_ROLE = 32  # characters; MySQL cuts no name, it refuses a longer one

_NOTE = """-- Run it in the database of the tables. A role counts for a user once it is granted and made the default:
--   GRANT {first} TO app@'%';
--   SET DEFAULT ROLE {first} FOR app@'%';  -- MariaDB
--   SET DEFAULT ROLE {first} TO app@'%';   -- MySQL"""

_preparer = mysql.dialect().identifier_preparer


def roles_sql(tables: Tables, prefix: str) -> str:
    """The SQL that makes the roles and grants them their rights. They have no login: users are granted them."""
    check_identifier(prefix, "prefix of the roles", LONGEST_ROLE - len("_producer"))
    names = {kind: f"{prefix}_{kind}" for kind in ROLES}
    parts = [_NOTE.format(first=names["producer"])]
    parts.append("\n".join(f"CREATE ROLE IF NOT EXISTS {_preparer.quote(name)};" for name in names.values()))
    for kind, task in ROLES.items():
        parts.append("\n".join([f"-- {names[kind]}: {task}", *_granted(tables, kind, names[kind])]))
    return "\n\n".join(parts)


def _granted(tables: Tables, kind: str, role: str) -> Iterator[str]:
    if kind == "producer":
        yield _grant(f"INSERT ({', '.join(map(_preparer.quote, EMITTED))})", tables.messages, role)
        cancel = "DELETE, SELECT (id, timer_id, timer_once, destination, done_at, lease_until)"
        yield "-- cancel_timer deletes, and the right to delete cannot be limited to timers. Only if it is used:"
        yield f"-- {_grant(cancel, tables.messages, role)}"
        return
    for right in rights_of(tables, kind):
        yield _grant(right.rights, right.table, role)
    if kind == "operator":
        # The information schema shows a role the tables that it has some right on: all others it would take as missing.
        yield _grant("SELECT", tables.inbox, role)
    if kind in ("relay", "worker"):
        yield "-- rebind_queues=True removes bindings that no route or listener asks for. Only if it is set:"
        yield f"-- {_grant('DELETE', tables.bindings, role)}"
    if kind == "worker":
        yield f"-- {_grant('DELETE', tables.owners, role)}"
    if kind == "relay":
        yield "-- A relay with routes binds them. Only if there are any:"
        yield f"-- {_grant('INSERT', tables.bindings, role)}"
        yield f"-- {_grant('UPDATE (bindings_version)', tables.state, role)}"


def _grant(rights: str, table: Table, role: str) -> str:
    return f"GRANT {rights} ON {_preparer.format_table(table)} TO {_preparer.quote(role)};"
