"""PostgresqlLogReader: what one process reads the log by, made in the event loop that it runs in."""

from __future__ import annotations

import asyncio

from outbox.core.errors import ConfigurationError
from outbox.core.events import Advised, Observer
from outbox.core.log import LogOptions
from outbox.core.reaching import sql_state
from outbox.stores.postgresql.wal.connection import ReplicationConnection, check_driver, quoted
from outbox.stores.postgresql.wal.feed import LogFeed
from outbox.stores.postgresql.wal.sink import LogSink
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.stream import LogStream
from outbox.stores.postgresql.wal.table import LoggedTable
from outbox.stores.postgresql.wal.waking import LogWaking

_REFUSED = "42501"  # a right is missing


class PostgresqlLogReader:
    """The stream, and what it fills: a relay's feed, or only wake-ups."""

    def __init__(
        self, slot: LogSlot, table: LoggedTable, waking: LogWaking, options: LogOptions, observe: Observer
    ) -> None:
        self._slot = slot
        self._options = options
        self._observe = observe
        self.feed: LogFeed | None = None
        sink: LogSink = waking
        if options.feeds:
            sink = self.feed = LogFeed(
                table,
                slot,
                waking,
                observe=observe,
                poll_interval=options.poll_interval,
                patience=options.patience,
            )
        self._stream = LogStream(
            sink,
            slot,
            options.url,
            observe=observe,
            slot_in_use_delay=options.slot_in_use_delay,
            restart_delay=options.restart_delay,
        )

    async def begin(self) -> None:
        """Say what cannot work: settings of the server, slot, publication, rights, or a pooler in between.

        From now on relays that poll the table are refused. Where the log only wakes, messages come without it, too.
        """
        check_driver()
        if self.feed is not None:
            await self._slot.check()
            await self.feed.record(*await self._identified())
            return
        try:
            await self._slot.check()
            await self._identified()
        except Exception as error:  # noqa: BLE001 - drivers throw what they like
            text = str(error).strip() or type(error).__name__
            until = "until then messages are found by polling and by the notifications of their producers"
            self._observe(Advised("relay", f"{text}; {until}"))

    async def _identified(self) -> tuple[str, int]:
        user = self._options.url.username or ""
        try:
            return await self._identify()
        except Exception as error:
            text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if sql_state(error) == _REFUSED or "replication" in text:
                raise ConfigurationError(
                    f"the role {user!r} may not read the write-ahead log ({text}): run ALTER ROLE {quoted(user)} WITH "
                    "REPLICATION, or name a role that has it in wal_url; a pooler in between must be passed by, too"
                ) from error
            raise

    async def _identify(self) -> tuple[str, int]:
        connection = await ReplicationConnection.open(self._options.url, self._slot.application)
        try:
            system, timeline, _ = await connection.identify()
        finally:
            await connection.close()
        return system, timeline

    async def run(self, stop: asyncio.Event) -> None:
        await self._stream.run(stop)
