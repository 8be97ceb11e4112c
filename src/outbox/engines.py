"""Engines: the database connections of an instance, from an engine it was given or from a URL."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import cached_property

from sqlalchemy import Engine
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.adapters import async_url, store_class, sync_url
from outbox.core.errors import ConfigurationError
from outbox.core.store import Store
from outbox.settings import Settings


class Engines:
    """One database, with and without an event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def configured(self) -> bool:
        return self._settings.db_engine is not None or self._settings.db_engine_url is not None

    @property
    def main(self) -> AsyncEngine | Engine:
        """The engine that was given, or one of our own."""
        if self._settings.db_engine is not None:
            return self._settings.db_engine
        return self.asynchronous

    @cached_property
    def asynchronous(self) -> AsyncEngine:
        """The engine for everything that waits on an event loop."""
        given = self._settings.db_engine
        if isinstance(given, AsyncEngine):
            return given
        if given is not None:
            raise ConfigurationError(
                "db_engine is a plain Engine: it can emit_sync, but a relay, a worker or `transaction()` needs an "
                "AsyncEngine; pass one, or db_engine_url"
            )
        if self._settings.db_engine_url is None:
            raise ConfigurationError("no database: call setup(db_engine_url=…) or set OUTBOX_DB_ENGINE_URL")
        url = async_url(self._settings.db_engine_url)
        try:
            return store_class(url.get_backend_name()).make_engine(url)
        except ArgumentError:  # its text repeats the URL, which may hold a password
            raise ConfigurationError(f"db_engine_url is not a URL that {url.drivername} can use") from None

    @cached_property
    def synchronous(self) -> Engine:
        """An engine for listeners that are plain functions and ask for a Session."""
        url = sync_url(self.asynchronous.url)
        return store_class(url.get_backend_name()).make_sync_engine(url)

    def asynchronous_if(self, dialect: str) -> AsyncEngine | None:
        """The engine for a store's own work, if this instance has one for that database."""
        if not self.configured:
            return None
        main = self.main
        return main if isinstance(main, AsyncEngine) and main.dialect.name == dialect else None

    def session(self) -> AsyncSession:
        """A session of our own making, safe on SQLite too."""
        return AsyncSession(self._safe, expire_on_commit=False)

    @cached_property
    def _safe(self) -> AsyncEngine:
        """What listeners and `transaction()` use: a given engine's transactions may not be safe."""
        engine = self.asynchronous
        if engine is not self._settings.db_engine:
            return engine
        return store_class(engine.dialect.name).safe_engine(engine)

    def sessions(self, store: Store) -> ListenerSessions:
        return ListenerSessions(self, store)

    async def close(self) -> None:
        """Dispose of what was made here, and only of that."""
        made = {self.__dict__[name] for name in ("asynchronous", "_safe") if name in self.__dict__}
        for engine in made - {self._settings.db_engine}:
            await engine.dispose()
        if "synchronous" in self.__dict__:
            self.synchronous.dispose()


class ListenerSessions:
    """Where a worker's listeners get their sessions."""

    def __init__(self, engines: Engines, store: Store) -> None:
        self._engines = engines
        self._store = store

    def asynchronous(self) -> AsyncSession:
        return self._engines.session()

    def synchronous(self) -> Session:
        return Session(self._engines.synchronous, expire_on_commit=False)

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._store.turn()
