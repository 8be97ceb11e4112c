"""PostgreSQL's roles: for each kind of process the rights that it needs, and no further one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import MetaData, Table
from sqlalchemy.dialects import postgresql

from outbox.stores.rights import ROLES, rights_of
from outbox.stores.rows import EMITTED
from outbox.stores.tables import LONGEST_SCHEMA, Tables, check_identifier

# The default before PostgreSQL 15 lets every role put functions and operators in the way of other roles' statements.
_CLOSED = (
    "-- So that no other role can create what statements of these roles would call. Other schemas in search_path too.\n"
    "REVOKE CREATE ON SCHEMA public FROM PUBLIC;"
)

_preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Grant:
    """Rights on a table, some of them on single columns only."""

    rights: str
    table: Table

    def to(self, role: str) -> str:
        return f"GRANT {self.rights} ON {_preparer.format_table(self.table)} TO {_preparer.quote(role)};"


def roles_sql(tables: Tables, prefix: str) -> str:
    """The SQL that makes the roles and grants them their rights. They have no login: users are granted them."""
    check_identifier(prefix, "prefix of the roles", LONGEST_SCHEMA - len("_producer"))
    names = {kind: f"{prefix}_{kind}" for kind in ROLES}
    parts = ["\n".join(_make(names[kind]) for kind in ROLES), _CLOSED, _usage(tables, list(names.values()))]
    for kind, task in ROLES.items():
        lines = [f"-- {names[kind]} {task}.", *_emits(tables, kind, names[kind])]
        lines += [grant.to(names[kind]) for grant in [Grant(*each) for each in rights_of(tables, kind)]]
        parts.append("\n".join([*lines, *_notes(tables, kind, names[kind])]))
    return "\n\n".join(parts)


def _make(role: str) -> str:
    quoted = _preparer.quote(role)
    return (
        f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') "
        f"THEN CREATE ROLE {quoted} NOLOGIN; END IF; END $$;"
    )


def _usage(tables: Tables, roles: list[str]) -> str:
    listed = ", ".join(map(_preparer.quote, roles))
    if tables.metadata.schema is not None:
        return f"GRANT USAGE ON SCHEMA {_preparer.quote(tables.metadata.schema)} TO {listed};"
    # Who runs this may be a superuser, and others may have put functions of these names in the way.
    grant = f"pg_catalog.format('GRANT USAGE ON SCHEMA %I TO {listed}', pg_catalog.current_schema())"
    return f"DO $$ BEGIN EXECUTE {grant}; END $$;"


def _emits(tables: Tables, kind: str, role: str) -> Iterator[str]:
    """What a producer may write: what emit writes, and neither a queue nor what relays and workers count."""
    if kind != "producer":
        return
    grant = Grant(f"INSERT ({', '.join(EMITTED)})", tables.messages)
    yield "-- The right to insert into the whole table, which older versions granted, would let it write more than"
    yield "-- messages, and some columns do not narrow it. One statement: no emit meets a moment without the right."
    yield f"DO $$ BEGIN {revoke_insert(tables, role)} {grant.to(role)} END $$;"


def revoke_insert(tables: Tables, role: str) -> str:
    return f"REVOKE INSERT ON {_preparer.format_table(tables.messages)} FROM {_preparer.quote(role)};"


def _notes(tables: Tables, kind: str, role: str) -> Iterator[str]:
    """What only some need, as comments; and what is no right on a table."""
    messages, quoted = tables.messages, _preparer.quote(role)
    if kind == "producer":
        cancel = Grant("DELETE, SELECT (timer_id, destination, done_at, lease_until)", messages)
        yield "-- cancel_timer deletes, and the right to delete cannot be limited to timers. Only if it is used:"
        yield f"-- {cancel.to(role)}"
    if kind in ("relay", "worker"):
        yield "-- rebind_queues=True removes bindings that no route or listener asks for. Only if it is set:"
        yield f"-- {Grant('DELETE', tables.bindings).to(role)}"
    if kind == "worker":
        yield f"-- {Grant('DELETE', tables.owners).to(role)}"
    if kind == "relay":
        binds = [Grant("INSERT", tables.bindings), Grant("UPDATE (bindings_version)", tables.state)]
        yield "-- A relay with routes binds them. Only if there are any:"
        yield from (f"-- {grant.to(role)}" for grant in binds)
    if kind == "operator":
        sequence = Table(f"{messages.name}_id_seq", MetaData(), schema=messages.schema)
        yield f"GRANT SELECT ON SEQUENCE {_preparer.format_table(sequence)} TO {quoted};"
        yield "-- doctor sees transactions of others that hold back vacuum only with:"
        yield f"-- GRANT pg_read_all_stats TO {quoted};"
