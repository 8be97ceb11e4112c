"""LogSlot: the replication slot and the publication of one table: made, dropped, checked and measured."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import String

from outbox.core.errors import ConfigurationError
from outbox.core.log import SlotStatus
from outbox.core.printing import in_bytes
from outbox.stores.owners import SqlOwners
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.wal.connection import quoted
from outbox.stores.postgresql.wal.table import LoggedTable
from outbox.stores.tables import Tables

LONGEST_NAME = 63
APPLICATION = "outbox relay"
FAILOVER_SINCE = 170000
MUCH = 1024**3  # bytes of log that a slot may hold back before it is said

_SERVER = text(
    """
    SELECT pg_catalog.current_setting('wal_level') AS wal_level,
        pg_catalog.current_setting('server_version_num')::int AS version,
        pg_catalog.pg_is_in_recovery() AS in_recovery,
        pg_catalog.current_database()::text AS database,
        pg_catalog.current_setting('max_slot_wal_keep_size', true) AS keep_size
    """
)
_SLOT = text(
    """
    SELECT s.slot_type::text AS type, s.plugin::text AS plugin, s.database::text AS database, s.active,
        s.active_pid, s.wal_status::text AS wal_status, s.safe_wal_size,
        CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
            ELSE pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), s.restart_lsn) END AS retained,
        CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
            ELSE pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), s.confirmed_flush_lsn) END AS unconfirmed,
        s.confirmed_flush_lsn::text AS confirmed,
        (pg_catalog.to_jsonb(s) ->> 'failover')::bool AS failover,
        r.application_name AS holder, pg_catalog.host(r.client_addr) AS address
    FROM pg_catalog.pg_replication_slots s
    LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid
    WHERE s.slot_name = CAST(CAST(:slot AS text) AS name)
    """
).bindparams(bindparam("slot", type_=String))
_STANDBYS = text(
    """
    SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity
    WHERE application_name = CAST(:name AS text) AND pid <> coalesce(CAST(:holder AS int), 0)
    """
).bindparams(bindparam("name", type_=String))
_TABLE = text(
    """
    SELECT n.nspname::text AS namespace, c.relname::text AS name
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = pg_catalog.to_regclass(CAST(:table AS text))
    """
).bindparams(bindparam("table", type_=String))
_PUBLICATION = text(
    """
    SELECT p.pubinsert, t.pubname IS NOT NULL AS has_table, pg_catalog.to_jsonb(t) ->> 'rowfilter' AS row_filter
    FROM pg_catalog.pg_publication p
    LEFT JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
        AND t.schemaname = CAST(CAST(:namespace AS text) AS name) AND t.tablename = CAST(CAST(:name AS text) AS name)
    WHERE p.pubname = CAST(CAST(:publication AS text) AS name)
    """
).bindparams(*(bindparam(each, type_=String) for each in ("namespace", "name", "publication")))


def slot_name(database: str, tables: Tables) -> str:
    """A slot's name, which no other database or table of the server derives."""
    plain = "_".join(filter(None, ("outbox", database, tables.messages.schema, tables.messages.name)))
    name = re.sub(r"[^a-z0-9_]", "_", plain.lower())
    if name == plain and len(name) <= LONGEST_NAME:
        return name
    told_apart = sha256("\n".join((database, tables.messages.schema or "", tables.messages.name)).encode()).hexdigest()
    return f"{name[: LONGEST_NAME - 9]}_{told_apart[:8]}"


@dataclass(frozen=True, slots=True)
class _Found:
    """What the catalogs say."""

    server: Any
    slot: Any
    table: Any
    publication: Any


class LogSlot:
    """A slot whose publication has its name. Nothing here makes one but `create`."""

    def __init__(
        self, tables: Tables, runner: PostgresqlRunner, owners: SqlOwners, table: LoggedTable, name: str
    ) -> None:
        self._tables = tables
        self._table = table
        self._runner = runner
        self._owners = owners
        self.name = name
        self.publication = name
        self.application = f"{APPLICATION} {name}"[:LONGEST_NAME]  # how the server shows relays that have it or wait
        self.retained_bytes: int | None = None  # of the log, when it was checked last
        self._ours: tuple[str, str] | None = None

    def is_ours(self, namespace: str, name: str) -> bool:
        """Whether a row is of this outbox: a publication may have further tables."""
        return self._ours is None or self._ours == (namespace, name)

    async def check(self) -> None:
        """Refuse to stream from a slot that would miss messages; the error says what to run."""
        found = await self._runner.inspect(self._found)
        problems = self._problems(found)
        if problems:
            raise ConfigurationError("the write-ahead log cannot be read: " + "; ".join(problems))
        self._ours = (found.table.namespace, found.table.name)
        self.retained_bytes = None if found.slot.retained is None else int(found.slot.retained)

    async def record(self, system: str, timeline: int) -> list[str]:
        """Record that the table is fed from the log, by this server; what is new about it."""
        known = await self._owners.feeds()
        here = f"{system}/{timeline}"
        if here in known:
            return []
        await self._owners.record_feed(here, self.name)
        if not known:
            return []
        return [
            f"the slot {self.name} is on another server or timeline than before, as after a failover or a restore: "
            "messages that it does not bring are found in the table"
        ]

    async def probe(self) -> None:
        """Raise if the database does not answer."""
        await self._runner.inspect(lambda connection: connection.execute(text("SELECT 1")))

    async def concerns(self) -> list[str]:
        """What should be known of the slot while it works."""
        found = (await self._runner.inspect(self._found)).slot
        if found is None:
            return []
        concerns = []
        if found.wal_status not in (None, "reserved", "extended"):
            concerns.append(
                f"the slot {self.name} is {found.wal_status}: the next checkpoint may remove what it needs. Raise "
                "max_slot_wal_keep_size, or see why the relay does not keep up"
            )
        elif found.retained is not None and found.retained > MUCH:
            concerns.append(f"the slot {self.name} holds back {in_bytes(int(found.retained))} of the write-ahead log")
        return concerns

    async def status(self) -> SlotStatus:
        """How the slot is, who has it, and who waits for it."""

        def work(connection: Connection) -> SlotStatus:
            found = self._found(connection)
            slot = found.slot
            holder = {"name": self.application, "holder": None if slot is None else slot.active_pid}
            return SlotStatus(
                name=self.name,
                publication=self.publication,
                problems=tuple(self._problems(found)),
                exists=slot is not None,
                active_pid=None if slot is None else slot.active_pid,
                holder=None if slot is None else slot.address or slot.holder,
                standbys=int(connection.scalar(_STANDBYS, holder) or 0),
                wal_status=None if slot is None else slot.wal_status,
                retained_bytes=None if slot is None or slot.retained is None else int(slot.retained),
                unconfirmed_bytes=None if slot is None or slot.unconfirmed is None else int(slot.unconfirmed),
                safe_bytes=None if slot is None or slot.safe_wal_size is None else int(slot.safe_wal_size),
                confirmed=None if slot is None else slot.confirmed,
                failover=None if slot is None else slot.failover,
                keep_size=found.server.keep_size,
            )

        return await self._runner.inspect(work)

    async def create(self, *, recreate: bool = False) -> list[str]:
        """Make what is missing; says what was done. A slot that was lost is made again only if it is asked for."""
        found = await self._runner.inspect(self._found)
        unfit = self._unfit(found)
        if unfit:
            raise ConfigurationError("; ".join(unfit))
        done: list[str] = []
        if found.publication is None:
            await self._run(self._publication_sql(found))
            done.append(f"made the publication {self.publication}")
        elif problem := self._publication_problem(found):
            raise ConfigurationError(problem)
        if found.slot is not None and recreate:
            await self._run(f"SELECT pg_catalog.pg_drop_replication_slot('{self.name}')")
            done.append(f"dropped the slot {self.name}")
        if found.slot is None or recreate:
            await self._run(self._slot_sql(found))
            done.append(f"made the slot {self.name}")
            with suppress(DBAPIError):  # this role may not write to the table: then the relay that takes the slot does
                await self._table.leave_all()
        elif problem := self._slot_problem(found):
            raise ConfigurationError(problem)
        return done

    async def drop(self) -> list[str]:
        """Drop slot and publication, and let the table be polled again; says what was done."""
        found = await self._runner.inspect(self._found)
        done: list[str] = []
        if found.slot is not None:
            await self._run(f"SELECT pg_catalog.pg_drop_replication_slot('{self.name}')")
            done.append(f"dropped the slot {self.name}")
        if found.publication is not None:
            await self._run(f"DROP PUBLICATION {quoted(self.publication)}")
            done.append(f"dropped the publication {self.publication}")
        if await self._owners.release_feeds():
            done.append("the table may be polled again")
        return done

    async def sql(self, role: str) -> list[str]:
        """What makes the publication, the slot and a role that may read it."""
        found = await self._runner.inspect(self._found)
        if found.table is None:
            raise ConfigurationError(f"there is no table {self._tables.messages.fullname}: outbox tables create")
        return [
            f"{self._publication_sql(found)};",
            f"{self._slot_sql(found)};",
            f"-- In a transaction of its own. The relay's role, or one only for OUTBOX_WAL_URL, needs REPLICATION:\n"
            f"ALTER ROLE {quoted(role)} WITH REPLICATION;",
        ]

    async def _run(self, statement: str) -> None:
        await self._runner.administer(lambda connection: connection.execute(text(statement)))

    def _found(self, connection: Connection) -> _Found:
        server = connection.execute(_SERVER).one()
        slot = connection.execute(_SLOT, {"slot": self.name}).first()
        full_name = connection.dialect.identifier_preparer.format_table(self._tables.messages)
        table = connection.execute(_TABLE, {"table": full_name}).first()
        publication = None
        if table is not None:
            names = {"namespace": table.namespace, "name": table.name, "publication": self.publication}
            publication = connection.execute(_PUBLICATION, names).first()
        return _Found(server, slot, table, publication)

    def _problems(self, found: _Found) -> list[str]:
        problems = self._unfit(found)
        if not problems:
            told = self._publication_problem(found), self._slot_problem(found)
            problems = [problem for problem in told if problem]
        return problems

    def _unfit(self, found: _Found) -> list[str]:
        """Why no slot can be used here."""
        problems = []
        if found.server.in_recovery:
            problems.append("this server is a standby: relay from the primary")
        if found.server.wal_level != "logical":
            problems.append(
                f"wal_level is {found.server.wal_level}: run ALTER SYSTEM SET wal_level = 'logical' and restart the "
                "server (hosted: set rds.logical_replication, cloudsql.logical_decoding or wal_level)"
            )
        if found.table is None:
            problems.append(f"there is no table {self._tables.messages.fullname}: run outbox tables create")
        return problems

    def _publication_problem(self, found: _Found) -> str | None:
        publication = found.publication
        if publication is None:
            return f"there is no publication {self.publication}: run outbox wal create"
        if not publication.has_table or not publication.pubinsert:
            table = self._full_name(found)
            return (
                f"the publication {self.publication} does not publish inserts into {table}: run ALTER PUBLICATION "
                f"{quoted(self.publication)} ADD TABLE {table}, or SET (publish = 'insert')"
            )
        if publication.row_filter:
            return f"the publication {self.publication} has a row filter, which would hold back messages: remove it"
        return None

    def _slot_problem(self, found: _Found) -> str | None:
        slot = found.slot
        if slot is None:
            return f"there is no slot {self.name}: run outbox wal create"
        if slot.type != "logical" or slot.plugin != "pgoutput" or slot.database != found.server.database:
            return (
                f"the slot {self.name} is {slot.type}, with plugin {slot.plugin} and of database {slot.database}: set "
                "wal_slot to another name, or drop it"
            )
        if slot.wal_status == "lost":
            return (
                f"the slot {self.name} is lost: it needed more than max_slot_wal_keep_size ({found.server.keep_size}) "
                "of the log. Run outbox wal create --recreate; messages that it missed are found in the table"
            )
        return None

    def _publication_sql(self, found: _Found) -> str:
        name = quoted(self.publication)
        return f"CREATE PUBLICATION {name} FOR TABLE {self._full_name(found)} WITH (publish = 'insert')"

    def _full_name(self, found: _Found) -> str:
        return f"{quoted(found.table.namespace)}.{quoted(found.table.name)}"

    def _slot_sql(self, found: _Found) -> str:
        failover = ", failover => true" if found.server.version >= FAILOVER_SINCE else ""
        return f"SELECT pg_catalog.pg_create_logical_replication_slot('{self.name}', 'pgoutput'{failover})"
