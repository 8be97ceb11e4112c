"""Spare: connections beside an engine's pool."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox.stores.sockets import cut_in_children


def spare(engine: Engine) -> Engine:
    """An engine that connects exactly as the given one, beside its pool: a full pool cannot block it."""
    pool = engine.pool.recreate()
    # No pre-ping: callers retry.
    pool._pre_ping = False
    cut_in_children(pool)
    return Engine(pool, engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
