"""Engines: the database connections of an instance, from an engine it was given or from a URL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any

from sqlalchemy import URL, Engine
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.adapters import async_url, parse_url, store_class, sync_url
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import Store
from outbox.core.strategy import is_factory
from outbox.settings import Settings


class Engines:
    """One database, with and without an event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._elsewhere: dict[URL, AsyncEngine] = {}
        self._elsewhere_in_threads: dict[URL, Engine] = {}

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
        return self._made(async_url(self._settings.db_engine_url))

    def _made(self, url: URL) -> AsyncEngine:
        try:
            return store_class(url.get_backend_name()).make_engine(url)
        except ArgumentError:  # its text repeats the URL, which may hold a password
            raise ConfigurationError(f"not a URL that {url.drivername} can use") from None

    @cached_property
    def synchronous(self) -> Engine:
        """An engine for plain functions that ask for a Session."""
        given = self._settings.db_engine
        if isinstance(given, Engine):
            return store_class(given.dialect.name).safe_engine(given)
        url = sync_url(self.asynchronous.url)
        return store_class(url.get_backend_name()).make_sync_engine(url)

    def asynchronous_if(self, dialect: str) -> AsyncEngine | None:
        """The engine for a store's own work, if this instance has one for that database."""
        if not self.configured:
            return None
        main = self.main
        return main if isinstance(main, AsyncEngine) and main.dialect.name == dialect else None

    def session(self, **options: Any) -> AsyncSession:
        """A session of our own making, safe on SQLite too."""
        return AsyncSession(self._safe, expire_on_commit=False, **options)

    def plain_session(self) -> Session:
        """The same for plain functions."""
        return Session(self.synchronous, expire_on_commit=False)

    @cached_property
    def _safe(self) -> AsyncEngine:
        """What listeners and `transaction()` use: a given engine's transactions may not be safe."""
        engine = self.asynchronous
        if engine is not self._settings.db_engine:
            return engine
        return store_class(engine.dialect.name).safe_engine(engine)

    def sessions(self, store: Store, listener: Listener) -> ListenerSessions:
        if listener.session_factory is None:
            return ListenerSessions(self, store)
        return ChosenSessions(self, store, listener)

    def elsewhere(self, url: str | URL) -> AsyncEngine:
        """An engine of our own for a listener's `session_factory`, made once."""
        url = async_url(url)
        self.check_database(url)
        return self._elsewhere.get(url) or self._elsewhere.setdefault(url, self._made(url))

    def elsewhere_in_threads(self, url: str | URL) -> Engine:
        """The same for plain sessions."""
        url = sync_url(parse_url(url))
        self.check_database(url)
        found = self._elsewhere_in_threads.get(url)
        # Several threads may be first. What all but one of them make has no connection yet.
        return found or self._elsewhere_in_threads.setdefault(
            url, store_class(url.get_backend_name()).make_sync_engine(url)
        )

    def check_database(self, url: URL) -> None:
        """Refuse a URL that cannot lead to the database in which the messages are."""
        kind, own = url.get_backend_name(), self.main.dialect.name
        if kind != own:
            raise ConfigurationError(
                f"session_factory leads to {kind}, and the messages are in {own}: a listener's transaction ends its "
                "message too, so both are in one database"
            )

    async def close(self) -> None:
        """Dispose of what was made here, and only of that."""
        made = {self.__dict__[name] for name in ("asynchronous", "_safe") if name in self.__dict__}
        for engine in made - {self._settings.db_engine}:
            await engine.dispose()
        if "synchronous" in self.__dict__ and self.synchronous is not self._settings.db_engine:
            self.synchronous.dispose()
        while self._elsewhere:
            await self._elsewhere.popitem()[1].dispose()
        while self._elsewhere_in_threads:
            self._elsewhere_in_threads.popitem()[1].dispose()


class ListenerSessions:
    """Where a worker's listeners get their sessions."""

    def __init__(self, engines: Engines, store: Store) -> None:
        self._engines = engines
        self.store = store

    def asynchronous(self, message: Message) -> AsyncSession:
        return self._engines.session(close_resets_only=False)  # whoever still has it then is too late

    def synchronous(self, message: Message) -> Session:
        return self._engines.plain_session()

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self.store.turn()


class ChosenSessions(ListenerSessions):
    """Sessions that a listener's `session_factory` gives."""

    def __init__(self, engines: Engines, store: Store, listener: Listener) -> None:
        super().__init__(engines, store)
        self._queue = listener.queue
        factory: Any = listener.session_factory
        self._source: Callable[[Message], Any] = lambda message: factory
        if isinstance(factory, str | URL):
            engines.check_database(parse_url(factory))
        elif not is_factory(factory):
            self._source = factory

    def asynchronous(self, message: Message) -> AsyncSession:
        source = self._source(message)
        if source is None:
            return super().asynchronous(message)
        if isinstance(source, str | URL):
            return AsyncSession(self._engines.elsewhere(source), expire_on_commit=False, close_resets_only=False)
        session = source()
        if not isinstance(session, AsyncSession):
            raise self._wrong(session, "AsyncSession")
        return session

    def synchronous(self, message: Message) -> Session:
        source = self._source(message)
        if source is None:
            return super().synchronous(message)
        if isinstance(source, str | URL):
            return Session(self._engines.elsewhere_in_threads(source), expire_on_commit=False)
        session = source()
        if not isinstance(session, Session):
            raise self._wrong(session, "Session")
        return session

    def _wrong(self, session: object, wanted: str) -> ConfigurationError:
        kind = type(session).__name__
        return ConfigurationError(f"{self._queue}: session_factory gave {kind}, and the listener asks for {wanted}")
