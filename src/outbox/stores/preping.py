"""Idle: a connection about which there is doubt is asked whether it still leads anywhere, before it is given out.

SQLAlchemy would ask each time, and a question takes as long as the transaction that it precedes. A server that goes
away closes its connections, which can be seen here without asking: there is something to read where nobody was asked.
"""

from __future__ import annotations

import select
import time
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError

from outbox.stores.sockets import descriptor

LONGEST_TRUST = 10.0  # seconds since it was last used after which something on the way may have forgotten it

_USED_AT = "outbox used at"


def ask_the_doubtful(engine: Engine) -> None:
    """Let the engine's pool replace connections that have died, all of them when one is found."""

    def given_back(connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    def given_out(connection: Any, record: Any, proxy: Any) -> None:
        used_at = record.info.get(_USED_AT)  # none: it was just made
        is_spare = proxy._pool is not engine.pool  # pools that are made like this one have its events
        if used_at is None or is_spare:
            return
        if time.monotonic() - used_at < LONGEST_TRUST and _is_quiet(record.driver_connection):
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", given_back)
    event.listen(engine, "checkout", given_out)


def _is_quiet(driver_connection: Any) -> bool:
    """Whether nothing came since the last answer: neither the end nor anything else."""
    with suppress(Exception):  # a closed one has no number any more, in each driver's own words
        waiting = select.poll()
        waiting.register(descriptor(driver_connection), select.POLLIN)
        return not waiting.poll(0)
    return False
