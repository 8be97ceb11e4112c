"""ReplicationConnection: one psycopg connection in COPY BOTH, read on the event loop without a thread."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self

from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg

from outbox.core.errors import ConfigurationError
from outbox.stores.postgresql.wal.pgoutput import status

CONNECT_WITHIN = 10.0  # seconds
END_WITHIN = 5.0  # seconds for the server to take the last position
SENDER_TIMEOUT = "10s"  # after which the server lets go of a relay that is frozen; its own default is a minute

# The server writes values by these settings where a type has no binary form, and the decoder reads them so.
_OPTIONS = {
    "wal_sender_timeout": SENDER_TIMEOUT,
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
_BINARY_SINCE = 140000

# What SQLAlchemy's drivers call what libpq has a name of its own for.
_LIBPQ_NAMES = {"ssl": "sslmode"}
_NOT_LIBPQ = {
    "prepared_statement_cache_size",
    "statement_cache_size",
    "prepared_statement_name_func",
    "command_timeout",
    "async_fallback",
    "prepare_threshold",
}


class ReplicationConnection:
    """Reads frames of a slot's stream, and tells the server what it may forget."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._pq = connection.pgconn
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, url: URL, application_name: str) -> Self:
        """Connect for replication. Errors are the driver's own."""
        driver = _driver()
        arguments = _libpq(url)
        settings = " ".join(f"-c {name}={value}" for name, value in _OPTIONS.items())
        arguments["options"] = f"{settings} {arguments.get('options', '')}".strip()
        arguments.setdefault("connect_timeout", str(int(CONNECT_WITHIN)))
        connecting = driver.AsyncConnection.connect(
            **arguments,
            application_name=application_name,
            client_encoding="UTF8",
            replication="database",
            autocommit=True,
        )
        async with asyncio.timeout(2 * CONNECT_WITHIN):
            return cls(await connecting)

    @property
    def server_version(self) -> int:
        version: int = self._pq.server_version
        return version

    async def identify(self) -> tuple[str, int, int]:
        """The server's identifier, its timeline, and the position up to which it has written its log."""
        cursor = await self._connection.execute("IDENTIFY_SYSTEM")
        system, timeline, position, _ = await cursor.fetchone()
        return str(system), int(timeline), as_position(position)

    async def start(self, slot: str, publication: str) -> None:
        """Have the slot's stream begin where it was confirmed. An error of SQLSTATE 55006 says that it is in use."""
        options = ["proto_version '1'", f"publication_names '{quoted(publication)}'"]
        if self.server_version >= _BINARY_SINCE:
            options.append("binary 'true'")
        await self._connection.execute(f"START_REPLICATION SLOT {quoted(slot)} LOGICAL 0/0 ({', '.join(options)})")

    def frame(self) -> bytes | None:
        """The next frame that has arrived already, if there is one. Raises the server's error at the end."""
        count, data = self._pq.get_copy_data(1)
        if count > 0:
            return bytes(data)
        if count == 0:
            return None
        result = self._pq.get_result()
        driver = _driver()
        if result is not None and result.error_field(driver.pq.DiagnosticField.SQLSTATE):
            raise driver.errors.error_from_result(result)
        raise ConnectionResetError("the server ended the replication stream")

    def send(self, received: int, flushed: int, now: int, *, reply: bool = False) -> None:
        """Tell the server what it may forget, and that this relay lives."""
        self._pq.put_copy_data(status(received, flushed, now, reply=reply))
        self._pq.flush()

    async def wait(self, wake: asyncio.Event, longest: float, *, reading: bool) -> None:
        """Wait until something arrives, the event is set, or the time is over. What is not read stays at the server."""
        descriptor = self._pq.socket
        if reading:
            self._loop.add_reader(descriptor, wake.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest):
                    await wake.wait()
        finally:
            if reading:
                self._loop.remove_reader(descriptor)
        if reading:
            self._pq.consume_input()
        self._pq.flush()

    async def end(self, received: int, flushed: int, now: int) -> None:
        """Tell the last position, and wait until the server has it: the next holder goes on behind it."""
        async with asyncio.timeout(END_WITHIN):
            self.send(received, flushed, now)
            self._pq.put_copy_end()
            while True:
                count, _ = self._pq.get_copy_data(1)
                if count < 0:
                    return
                if count == 0:
                    await self.wait(asyncio.Event(), 0.05, reading=True)

    async def close(self) -> None:
        with suppress(Exception):  # it is broken already
            async with asyncio.timeout(END_WITHIN):
                await self._connection.close()


def _libpq(url: URL) -> dict[str, Any]:
    """What libpq calls a URL's parts, whichever driver it is for; `host=a:1&host=b:2` in it are two hosts."""
    given = {
        _LIBPQ_NAMES.get(name, name): value if name in ("host", "port") or isinstance(value, str) else ",".join(value)
        for name, value in url.query.items()
        if name not in _NOT_LIBPQ
    }
    dialect: Any = PGDialectAsync_psycopg
    _, arguments = dialect().create_connect_args(url.set(query=given))
    return {name: value if name == "port" else str(value) for name, value in arguments.items()}


def as_position(text: str) -> int:
    """A position of the log as a number."""
    high, low = text.split("/")
    return (int(high, 16) << 32) + int(low, 16)


def as_lsn(position: int) -> str:
    """A position as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def check_driver() -> None:
    """Refuse to begin without what the stream needs."""
    _driver()


def _driver() -> Any:
    try:
        import psycopg
    except ImportError:
        psycopg = None  # type: ignore[assignment]
    version = () if psycopg is None else tuple(int(part) for part in psycopg.__version__.split(".")[:2])
    if version < (3, 3):
        found = "it is not installed" if psycopg is None else f"this is {psycopg.__version__}"
        raise ConfigurationError(
            f"relay_from='wal' reads the write-ahead log with psycopg 3.3 or later, and {found}: "
            "pip install 'psycopg[binary]>=3.3'"
        )
    return psycopg
