"""Idle: a connection that nobody used for a while is asked whether it still leads anywhere, before it is given out.

SQLAlchemy would ask each time, and a question takes as long as the transaction that it precedes.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError

LONGEST_TRUST = 0.5  # seconds since it was last used for which a connection is taken to be alive

_USED_AT = "outbox used at"


def ask_the_idle(engine: Engine) -> None:
    """Let the engine's pool replace connections that have died, all of them when one is found."""

    def given_back(connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    def given_out(connection: Any, record: Any, proxy: Any) -> None:
        used_at = record.info.get(_USED_AT)  # none: it was just made
        is_spare = proxy._pool is not engine.pool  # pools that are made like this one have its events
        if used_at is None or is_spare or time.monotonic() - used_at < LONGEST_TRUST:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", given_back)
    event.listen(engine, "checkout", given_out)
