"""Django: an app that sets the outbox up from Django's own settings, and brings `manage.py outbox …`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL

from outbox.core.errors import ConfigurationError

__all__ = ["database_url"]

_BACKENDS = {"postgresql": "postgresql", "postgis": "postgresql", "sqlite3": "sqlite", "spatialite": "sqlite"}
_NOT_TAKEN = ("service", "passfile", "sslmode", "sslcert", "sslkey", "sslrootcert", "options")  # drivers differ in them


def database_url(database: Mapping[str, Any]) -> URL:
    """The URL of an entry of Django's `DATABASES`, for `setup(db_engine_url=…)`."""
    engine = str(database.get("ENGINE", ""))
    backend = _BACKENDS.get(engine.rpartition(".")[2])
    if backend is None:
        raise ConfigurationError(f"ENGINE={engine!r}: outbox knows Django's backends {', '.join(_BACKENDS)}")
    lost = sorted(set(_NOT_TAKEN) & set(database.get("OPTIONS") or ()))
    if lost:
        raise ConfigurationError(
            f"OPTIONS of Django's database has {', '.join(lost)}, which no URL can say for every driver: set "
            "OUTBOX = {'db_engine_url': 'postgresql+asyncpg://…'} with what your driver calls it"
        )
    if backend == "sqlite":
        return URL.create(backend, database=str(database["NAME"]))
    host = database.get("HOST") or None
    socket = host is not None and host.startswith("/")
    return URL.create(
        backend,
        username=database.get("USER") or None,
        password=database.get("PASSWORD") or None,
        host=None if socket else host,
        port=int(database["PORT"]) if database.get("PORT") else None,
        database=str(database["NAME"]),
        query={"host": str(host)} if socket else {},
    )
