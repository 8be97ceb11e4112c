"""A database's log as a relay's feed or for wake-ups: what such a store offers, and what is told of the slot."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sqlalchemy import URL

from outbox.core.backoff import RestartDelay
from outbox.core.claim import Feed
from outbox.core.errors import ConfigurationError
from outbox.core.events import Observer

FEEDS = ("table", "wal")  # where a relay may have its messages from

_SLOT = re.compile(r"[a-z0-9_]{1,63}")


def check_log_settings(relay_from: object, slot: object, url: object) -> None:
    """Refuse what names no feed, and what PostgreSQL takes for no slot's name."""
    if relay_from not in FEEDS:
        raise ConfigurationError(f"relay_from={relay_from!r}: {' or '.join(map(repr, FEEDS))}")
    if slot is not None and not (isinstance(slot, str) and _SLOT.fullmatch(slot)):
        raise ConfigurationError(f"wal_slot={slot!r}: up to 63 lower-case letters, digits and underscores")
    if url is not None and not isinstance(url, str | URL):
        raise ConfigurationError(f"wal_url={type(url).__name__}: a URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How a relay reads the log."""

    feeds: bool  # whether a relay has its messages from the log; if not, the log only wakes
    url: URL  # of the replication connection, which no pooler may be in front of
    slot: str | None  # its name; none: derived from the database and the table
    poll_interval: float  # seconds between two polls for what the log left to the table
    slot_in_use_delay: float  # seconds between two tries to take a slot that another relay has
    restart_delay: RestartDelay | None  # after other errors
    patience: float | None  # seconds that a claim waits for the answers of the one before; none: until they are there


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """How a replication slot is at this moment."""

    name: str
    publication: str
    problems: Sequence[str]  # why no relay can read it; each says what to run
    exists: bool
    active_pid: int | None  # the server's process that sends to the relay which has it
    holder: str | None  # that relay's address
    standbys: int  # relays that wait for it
    wal_status: str | None  # the server's word: reserved, extended, unreserved or lost
    retained_bytes: int | None  # of the log, that the server keeps for it
    unconfirmed_bytes: int | None  # of the log, since the last position that was confirmed
    safe_bytes: int | None  # of the log, that may be written before it is in danger; none: no limit is set
    confirmed: str | None
    failover: bool | None  # whether standbys have it too; none: this server cannot
    keep_size: str | None  # max_slot_wal_keep_size


class LogAdministration(Protocol):
    """The slot and what belongs to it."""

    @property
    def name(self) -> str: ...

    async def check(self) -> None:
        """ConfigurationError if the log cannot be read, or would miss messages; it says what to run."""
        ...

    async def status(self) -> SlotStatus: ...

    async def create(self, *, recreate: bool = False) -> list[str]:
        """Make what is missing; says what was done. A slot that is there is made again only if it is asked for."""
        ...

    async def drop(self) -> list[str]:
        """Drop it, and let the table be polled again; says what was done."""
        ...

    async def sql(self, role: str) -> list[str]:
        """The statements that make it, and let a role read it."""
        ...


class LogReader(Protocol):
    """Reads the log while `run` runs."""

    @property
    def feed(self) -> Feed | None:
        """What a publisher claims from; none: the log only wakes what claims from the table."""
        ...

    async def begin(self) -> None:
        """ConfigurationError if a feed cannot be read. From now on relays that poll the table are refused beside it."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Read until `stop`, or wait for another reader to end."""
        ...


@runtime_checkable
class LogStore(Protocol):
    """A store whose database can be read by its log."""

    def log_administration(self, url: URL, slot: str | None) -> LogAdministration: ...

    def log_reader(self, options: LogOptions, observe: Observer) -> LogReader: ...
