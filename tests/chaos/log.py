"""Log: a PostgreSQL whose write-ahead log the relays read, and the order of commits as that log tells it.

The rig has a slot of its own, with the rows beside the messages in its publication. Decoding gives transactions in the
order of their commits, and nothing else in PostgreSQL gives that order exactly: commit timestamps are taken before
commit records are written.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.chaos.database import PostgresqlDatabase
from tests.chaos.evidence import FinalTables
from tests.chaos.tables import TABLE_NAME
from tests.support.proxy import Link

ROOT = Path(__file__).parents[2]

SLOT, WITNESS = "chaos", "witness"  # the relays' slot, and the rig's own
SENDER_TIMEOUT = 3.0  # seconds after which the server lets go of a relay that is silent; a freeze lasts longer
TRY_EVERY = 0.5  # seconds between two tries of a relay that stands by

_HOLDER = text(
    "SELECT r.application_name FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid "
    "WHERE s.slot_name = :slot"
)
_END = text("SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots WHERE slot_name = :slot")
_MAKE = text("SELECT pg_create_logical_replication_slot(:slot, 'pgoutput')")
_DROP = text("SELECT pg_drop_replication_slot(:slot)")
_READ = text(
    "SELECT data FROM pg_logical_slot_get_binary_changes(:slot, NULL, NULL, 'proto_version', '1', "
    f"'publication_names', '{WITNESS}')"
)


class LoggedDatabase(PostgresqlDatabase):
    """Its relays have one slot, which one of them holds."""

    def _make_tables(self) -> None:
        super()._make_tables()
        self.make_slot()
        with self.connection() as connection:
            connection.execute(text(f"CREATE PUBLICATION {WITNESS} FOR TABLE orders WITH (publish = 'insert')"))
        with self.connection() as connection:  # a slot is made in a transaction that has written nothing
            connection.execute(_MAKE, {"slot": WITNESS})
        self._commits: dict[str, None] = {}
        self._reading = Lock()  # a slot has one reader at a time

    def for_relays(self, link: Link | None) -> Mapping[str, str]:
        assert link is not None
        url = self.url.set(port=link.port).update_query_dict(
            {"options": f"-c wal_sender_timeout={SENDER_TIMEOUT * 1000:.0f}"}
        )
        return {
            "OUTBOX_RELAY_FROM": "wal",
            "OUTBOX_WAL_SLOT": SLOT,
            "OUTBOX_WAL_URL": url.render_as_string(hide_password=False),
            "OUTBOX_SLOT_IN_USE_DELAY": f"{TRY_EVERY}s",
        }

    # Faults.

    def holder(self) -> str:
        """The process that has the slot; empty if none has it."""
        with self.connection() as connection:
            return connection.scalar(_HOLDER, {"slot": SLOT}) or ""

    def end_stream(self) -> bool:
        """End the server's process that sends the log; whether there was one."""
        with self.connection() as connection:
            return bool(connection.scalar(_END, {"slot": SLOT}))

    def drop_slot(self) -> bool:
        """Drop it; False if another relay took it meanwhile."""
        self.end_stream()
        try:
            with self.connection() as connection:
                connection.execute(_DROP, {"slot": SLOT})
        except DBAPIError:
            return False
        return True

    def make_slot(self) -> None:
        """As an operator does."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        environment |= {
            "OUTBOX_DB_ENGINE_URL": self.url.render_as_string(hide_password=False),
            "OUTBOX_TABLE_NAME": TABLE_NAME,
            "OUTBOX_WAL_SLOT": SLOT,
        }
        subprocess.run(
            [sys.executable, "-m", "outbox", "wal", "create"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    # Looking.

    def witness(self) -> None:
        """Read what was committed since the last time; after a crash the server may tell some of it again."""
        with self._reading, self.connection() as connection:
            frames = connection.scalars(_READ, {"slot": WITNESS}).all()
        self._commits.update(dict.fromkeys(_inserted(frames)))

    def final_tables(self) -> FinalTables:
        self.witness()
        return replace(super().final_tables(), commits=tuple(self._commits))


def _inserted(frames: object) -> Iterator[str]:
    """The first column of every row, in the order of the log."""
    for frame in frames:  # type: ignore[attr-defined]
        if frame[:1] == b"I":
            # The kind, the table, the letter N, a count of columns; then for each a kind, a size and its text.
            (size,) = struct.unpack_from("!I", frame, 9)
            yield bytes(frame[13 : 13 + size]).decode()
