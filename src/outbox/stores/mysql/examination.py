"""What a doctor asks MariaDB and MySQL: whether they take what is written, keep it, and clean up behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from outbox.core.diagnosis import Finding, Level
from outbox.core.durations import in_words
from outbox.core.errors import ConfigurationError
from outbox.stores.tables import Tables

LONG_OPEN = timedelta(minutes=5)  # a transaction that is open for longer does harm
OLDEST_MARIADB, OLDEST_MYSQL = (10, 6), (8, 0, 17)  # SKIP LOCKED, JSON_TABLE, and a collation that counts spaces

_NEXT_ID = text(
    """
    SELECT AUTO_INCREMENT FROM information_schema.TABLES
    WHERE TABLE_NAME = :name AND TABLE_SCHEMA = COALESCE(:schema, DATABASE())
    """
)

_VARIABLES = text(
    """
    SHOW GLOBAL VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format', 'read_only', 'sysdate_is_now',
        'innodb_flush_log_at_trx_commit')
    """
)

_OLDEST = text(
    """
    SELECT trx_mysql_thread_id AS id, TIMESTAMPDIFF(SECOND, trx_started, NOW()) AS seconds
    FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id <> CONNECTION_ID() ORDER BY trx_started LIMIT 1
    """
)


def refuse_older(dialect: Any) -> None:
    """Raise ConfigurationError for a server that lacks what claims need. A dialect that has connected once knows."""
    name, oldest = ("MariaDB", OLDEST_MARIADB) if dialect.is_mariadb else ("MySQL", OLDEST_MYSQL)
    if dialect.server_version_info >= oldest:
        return
    found, needed = (".".join(map(str, numbers)) for numbers in (dialect.server_version_info, oldest))
    raise ConfigurationError(
        f"{name} {found} is too old, and {needed} or newer is needed: older ones have no SKIP LOCKED or no JSON_TABLE"
    )


def server(connection: Connection) -> str:
    written = str(connection.scalar(text("SELECT VERSION()")))
    return f"{'MariaDB' if _is_mariadb(written) else 'MySQL'} {'.'.join(map(str, _version(written)))}"


def rows_written(connection: Connection, tables: Tables) -> int:
    """Numbers are drawn in blocks by statements that copy rows: it may be more than were written."""
    here = {"name": tables.messages.name, "schema": tables.messages.schema}
    return int(connection.scalar(_NEXT_ID, here) or 1) - 1


def findings(connection: Connection) -> Iterator[Finding]:
    """What may refuse messages, lose them or slow the tables down."""
    variables = _variables(connection)
    yield Finding(Level.OK, "server", server(connection))
    yield _writes(variables)
    yield _log(variables)
    yield _crashes(variables)
    yield _clock(variables)
    yield _oldest_transaction(connection)
    what = "none between processes: a message from another one is found at the next poll, after poll_interval at most"
    yield Finding(Level.OK, "wake-ups", what)


def _variables(connection: Connection) -> Mapping[str, str]:
    return {str(name): str(value) for name, value in connection.execute(_VARIABLES)}


def _writes(variables: Mapping[str, str]) -> Finding:
    if variables.get("read_only", "OFF").upper() in ("OFF", "0"):
        return Finding(Level.OK, "writes", "the server takes them")
    advice = "let db_engine_url lead to the primary; after a failover, to the new one"
    return Finding(Level.ERROR, "writes", "the server is read-only, as a replica is", advice)


def _log(variables: Mapping[str, str]) -> Finding:
    format = variables.get("binlog_format", "ROW").upper()
    if variables.get("log_bin", "OFF").upper() in ("OFF", "0") or format != "STATEMENT":
        return Finding(Level.OK, "binary log", "takes transactions at READ COMMITTED")
    what = "binlog_format is STATEMENT, for which the server refuses transactions at READ COMMITTED"
    return Finding(Level.ERROR, "binary log", what, "set binlog_format to ROW or MIXED")


def _crashes(variables: Mapping[str, str]) -> Finding:
    flushed = variables.get("innodb_flush_log_at_trx_commit", "1")
    if flushed == "1":
        return Finding(Level.OK, "commits", "are flushed to the disk")
    what = f"innodb_flush_log_at_trx_commit is {flushed}: a crash of the machine loses transactions that were committed"
    return Finding(Level.WARNING, "commits", what, "set it to 1, or accept that messages are lost with their data")


def _clock(variables: Mapping[str, str]) -> Finding:
    if variables.get("sysdate_is_now", "OFF").upper() in ("OFF", "0"):
        return Finding(Level.OK, "sysdate", "tells the time within a statement")
    what = "sysdate_is_now is on: after a wait for a lock, a lease that ran out meanwhile counts as a good one"
    return Finding(Level.WARNING, "sysdate", what, "start the server without it")


def _oldest_transaction(connection: Connection) -> Finding:
    try:
        found = connection.execute(_OLDEST).first()
    except DBAPIError:  # a role may not see those of others
        grant = "to see those of others: GRANT PROCESS ON *.* TO the user"
        return Finding(Level.OK, "transactions", "this role may not see those of others", grant)
    if found is None:
        return Finding(Level.OK, "transactions", "none is open that holds back the purge of deleted rows")
    what = f"the oldest is open for {in_words(timedelta(seconds=float(found.seconds)))}"
    if found.seconds < LONG_OPEN.total_seconds():
        return Finding(Level.OK, "transactions", what)
    advice = (
        "deleted rows stay behind it (the history list grows) and claims become slow: let its application commit, or "
        f"end it with KILL {found.id}"
    )
    return Finding(Level.WARNING, "transactions", what, advice)


def _is_mariadb(written: str) -> bool:
    return "mariadb" in written.lower()


def _version(written: str) -> tuple[Any, ...]:
    """Of `10.11.19-MariaDB-0+deb12u1` or `8.4.3`, as numbers. Some old clients were told of a version 5.5.5 first."""
    numbers = written.removeprefix("5.5.5-").partition("-")[0].split(".")
    return tuple(int(each) for each in numbers if each.isdigit())
