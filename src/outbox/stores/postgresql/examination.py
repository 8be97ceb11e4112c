"""What a doctor asks PostgreSQL: who holds back vacuum, and whether it keeps up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from sqlalchemy import Connection, String, bindparam, text

from outbox.core.diagnosis import Finding, Level
from outbox.core.durations import in_words
from outbox.stores.postgresql.connection import as_array
from outbox.stores.postgresql.roles import revoke_insert
from outbox.stores.tables import Tables

LONG_OPEN = timedelta(minutes=5)  # a transaction that is open for longer does harm
DEAD_ROWS = 10_000  # so many dead rows, and a fifth of the living ones, are more than autovacuum leaves behind
CATALOG = "pg_catalog"

_OLDEST = text(
    """
    SELECT pid, usename AS role, state, extract(epoch FROM now() - xact_start) AS seconds
    FROM pg_catalog.pg_stat_activity
    WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()
      AND backend_type = 'client backend' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
      AND xact_start IS NOT NULL
    ORDER BY xact_start LIMIT 1
    """
)
_SEES_ALL = text(
    "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS yes, current_user AS role"
)
_PREPARED = text(
    """
    SELECT gid, owner AS role, extract(epoch FROM now() - prepared) AS seconds, count(*) OVER () AS number
    FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared LIMIT 1
    """
)
_DEAD = text(
    """
    SELECT relname AS name, n_live_tup AS live, n_dead_tup AS dead
    FROM pg_catalog.pg_stat_user_tables
    WHERE relname = ANY(CAST(:names AS text[])) AND CASE WHEN CAST(:schema AS text) IS NULL
        THEN pg_catalog.pg_table_is_visible(relid) ELSE schemaname = CAST(:schema AS text) END
    ORDER BY n_dead_tup DESC
    """
).bindparams(bindparam("names", type_=String), bindparam("schema", type_=String))

_OPEN_SCHEMAS = text(
    """
    SELECT n.nspname AS name FROM pg_catalog.pg_namespace n
    WHERE n.nspname = ANY(pg_catalog.current_schemas(false))
      AND pg_catalog.has_schema_privilege('public', n.oid, 'CREATE')
    """
)
_SEARCH_PATH = text("SELECT CAST(pg_catalog.current_schemas(false) AS text[])")


_WHOLE_INSERTS = text(
    """
    SELECT CASE acl.grantee WHEN CAST(0 AS oid) THEN 'PUBLIC' ELSE pg_catalog.pg_get_userbyid(acl.grantee) END AS role
    FROM pg_catalog.pg_class AS class, LATERAL pg_catalog.aclexplode(class.relacl) AS acl
    WHERE class.oid = CAST(pg_catalog.to_regclass(CAST(:table AS text)) AS oid) AND acl.grantee <> class.relowner
    GROUP BY acl.grantee
    HAVING bool_or(acl.privilege_type = 'INSERT') AND NOT bool_or(acl.privilege_type = 'SELECT')
    ORDER BY role
    """
)


def server(connection: Connection) -> str:
    return f"PostgreSQL {str(connection.scalar(text('SHOW server_version'))).split()[0]}"


def findings(tables: Tables, connection: Connection) -> Iterator[Finding]:
    """What may slow the tables down."""
    yield _oldest_transaction(connection)
    yield _prepared_transaction(connection)
    yield _dead_rows(tables, connection)
    yield _producers(tables, connection)
    yield _search_path(connection)


def _oldest_transaction(connection: Connection) -> Finding:
    sees = connection.execute(_SEES_ALL).one()
    limits = "" if sees.yes else ", as far as this role may see"
    grant = "" if sees.yes else f"to see those of other roles: GRANT pg_read_all_stats TO {sees.role}"
    found = connection.execute(_OLDEST).first()
    if found is None:
        return Finding(Level.OK, "transactions", f"none is open that holds back vacuum{limits}", grant)
    age = timedelta(seconds=float(found.seconds))
    what = f"the oldest that holds back vacuum is open for {in_words(age)}, {found.state}, role {found.role}"
    if age < LONG_OPEN:
        return Finding(Level.OK, "transactions", f"{what}{limits}", grant)
    advice = (
        f"dead rows pile up behind it and claims become slow: let its application commit, or end it with "
        f"SELECT pg_catalog.pg_terminate_backend({found.pid})"
    )
    return Finding(Level.WARNING, "transactions", what, advice)


def _prepared_transaction(connection: Connection) -> Finding:
    found = connection.execute(_PREPARED).first()
    if found is None:
        return Finding(Level.OK, "prepared transactions", "none")
    age = timedelta(seconds=float(found.seconds))
    what = f"{found.number}, the oldest {found.gid!r} of role {found.role}, {in_words(age)} old"
    if age < LONG_OPEN:
        return Finding(Level.OK, "prepared transactions", what)
    advice = "it outlives its session and holds back vacuum: end it with COMMIT PREPARED or ROLLBACK PREPARED"
    return Finding(Level.WARNING, "prepared transactions", what, advice)


def _dead_rows(tables: Tables, connection: Connection) -> Finding:
    names = as_array(table.name for table in tables.metadata.sorted_tables)
    rows = connection.execute(_DEAD, {"names": names, "schema": tables.metadata.schema}).all()
    many = [row for row in rows if row.dead > DEAD_ROWS + row.live / 5]
    if not many:
        return Finding(Level.OK, "dead rows", f"{sum(row.dead for row in rows)}")
    what = ", ".join(f"{row.dead} in {row.name} beside {row.live} living" for row in many)
    advice = "vacuum does not keep up: see whether a transaction holds it back, then VACUUM (VERBOSE) the table"
    return Finding(Level.WARNING, "dead rows", what, advice)


def _producers(tables: Tables, connection: Connection) -> Finding:
    """Roles that only insert. A relay, a worker or an operator reads the table, too."""
    table = connection.dialect.identifier_preparer.format_table(tables.messages)
    roles = list(connection.execute(_WHOLE_INSERTS, {"table": table}).scalars())
    if not roles:
        return Finding(Level.OK, "producers", "no role that only emits may write other columns than emit does")
    what = f"{', '.join(roles)} may insert into every column of {tables.messages.name}"
    advice = (
        "such a role can write into any queue, and rows that are dead-lettered as undecodable: run what `outbox tables "
        f"sql --roles` prints, and for roles that are not of its making: "
        f"{' '.join(revoke_insert(tables, role) for role in roles)}"
    )
    return Finding(Level.WARNING, "producers", what, advice)


def _search_path(connection: Connection) -> Finding:
    """A role that may create there can put functions and operators in the way of other roles' statements."""
    named: list[str] = connection.scalar(_SEARCH_PATH) or []
    if CATALOG in named[1:]:
        what = (
            f"{', '.join(named)}: {CATALOG} is not the first, so that functions and operators of the others replace its"
        )
        advice = f"leave {CATALOG} out of the search_path of this role and database: then it is the first"
        return Finding(Level.WARNING, "search path", what, advice)
    names = [row.name for row in connection.execute(_OPEN_SCHEMAS)]
    if not names:
        return Finding(Level.OK, "search path", "no schema in it is open for every role to create in")
    what = f"every role may create functions and operators in {', '.join(names)}, which run as the role that meets them"
    quote = connection.dialect.identifier_preparer.quote
    advice = " ".join(f"REVOKE CREATE ON SCHEMA {quote(name)} FROM PUBLIC;" for name in names)
    return Finding(Level.WARNING, "search path", what, advice)
