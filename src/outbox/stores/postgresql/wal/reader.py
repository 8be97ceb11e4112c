"""PostgresqlLogReader: the feed and the stream of one relay, made in the event loop that they run in."""

from __future__ import annotations

import asyncio

from outbox.core.errors import ConfigurationError
from outbox.core.events import Observer
from outbox.core.log import LogOptions
from outbox.core.reaching import sql_state
from outbox.stores.postgresql.wal.connection import ReplicationConnection, check_driver, quoted
from outbox.stores.postgresql.wal.feed import LogFeed
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.stream import LogStream
from outbox.stores.postgresql.wal.table import LoggedTable

_REFUSED = "42501"  # a right is missing


class PostgresqlLogReader:
    """What a relay reads the write-ahead log by."""

    def __init__(self, slot: LogSlot, table: LoggedTable, options: LogOptions, observe: Observer) -> None:
        self._slot = slot
        self._options = options
        self.feed = LogFeed(table, poll_interval=options.poll_interval, patience=options.patience)
        self._stream = LogStream(
            self.feed,
            slot,
            options.url,
            observe=observe,
            slot_in_use_delay=options.slot_in_use_delay,
            restart_delay=options.restart_delay,
        )

    async def begin(self) -> None:
        """Say what cannot work: settings of the server, slot, publication, rights, or a pooler in between.

        From now on relays that poll the table are refused.
        """
        check_driver()
        await self._slot.check()
        user = self._options.url.username or ""
        try:
            system, timeline = await self._identified()
        except Exception as error:
            text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if sql_state(error) == _REFUSED or "replication" in text:
                raise ConfigurationError(
                    f"the role {user!r} may not read the write-ahead log ({text}): run ALTER ROLE {quoted(user)} WITH "
                    "REPLICATION, or name a role that has it in wal_url; a pooler in between must be passed by, too"
                ) from error
            raise
        await self._stream.record(system, timeline)

    async def _identified(self) -> tuple[str, int]:
        connection = await ReplicationConnection.open(self._options.url, self._slot.application)
        try:
            system, timeline, _ = await connection.identify()
        finally:
            await connection.close()
        return system, timeline

    async def run(self, stop: asyncio.Event) -> None:
        await self._stream.run(stop)
