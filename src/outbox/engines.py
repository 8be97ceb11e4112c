"""Engines: the database connections of an instance, from an engine it was given or from a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Engine, NullPool, Pool, StaticPool
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.adapters import async_url, is_same_database, parse_url, store_class, sync_url
from outbox.core.errors import ConfigurationError, ForkRefused, WrongDatabase, WrongEventLoop
from outbox.core.forks import never_collect
from outbox.core.kept_property import kept_property
from outbox.core.listener import Listener
from outbox.core.listener_options import is_factory
from outbox.core.loops import LoopLocal
from outbox.core.message import Message
from outbox.core.store import Store
from outbox.settings import Settings

DISPOSE_WITHIN = 5.0  # seconds for closing the connections of an event loop


class Engines:
    """One database, with and without an event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loops = LoopLocal(_EnginesOfLoop, _EnginesOfLoop.close)
        self._owners: WeakKeyDictionary[Pool, asyncio.AbstractEventLoop] = WeakKeyDictionary()
        self._elsewhere_in_threads: dict[URL, Engine] = {}
        self._stayed_behind = False

    @property
    def configured(self) -> bool:
        return self._settings.db_engine is not None or self._settings.db_engine_url is not None

    @property
    def dialect(self) -> str | None:
        """The name of the database, for which no engine is made; none if there is no database."""
        given, url = self._settings.db_engine, self._settings.db_engine_url
        if given is not None:
            return given.dialect.name
        return None if url is None else parse_url(url).get_backend_name()

    @kept_property
    def main(self) -> AsyncEngine | Engine:
        """The engine that was given, or a pattern for those of the event loops, which nothing connects by."""
        given = self._settings.db_engine
        if given is not None:
            return given
        if self._settings.db_engine_url is None:
            raise ConfigurationError("no database: call setup(db_engine_url=…) or set OUTBOX_DB_ENGINE_URL")
        if self._stayed_behind:
            raise ForkRefused("the database in memory is the parent's, from which this process was forked: use a file")
        return _made(async_url(self._settings.db_engine_url))

    @property
    def _pattern(self) -> AsyncEngine:
        if isinstance(self.main, AsyncEngine):
            return self.main
        raise ConfigurationError(
            "db_engine is a plain Engine: it can emit_sync, but a relay, a worker or `transaction()` needs an "
            "AsyncEngine; pass one, or db_engine_url"
        )

    def check(self) -> None:
        """Say what cannot work: no database, or one that nothing can wait for on an event loop."""
        self._pattern  # noqa: B018

    @property
    def asynchronous(self) -> AsyncEngine:
        """The engine for everything that waits on the running event loop: the given one, or the loop's own."""
        engine = self._pattern
        if engine is self._settings.db_engine or isinstance(engine.pool, StaticPool):
            return engine
        own = self._loops.here()
        if own.main is None:
            own.main = _made(engine.url)
        return own.main

    @kept_property
    def synchronous(self) -> Engine:
        """An engine for plain functions that ask for a Session."""
        given = self._settings.db_engine
        if isinstance(given, Engine):
            return store_class(given.dialect.name).safe_engine(given)
        url = sync_url(self._pattern.url)
        return store_class(url.get_backend_name()).make_sync_engine(url)

    def check_dialect(self, dialect: str) -> None:
        """Refuse a caller's database of another kind, if this instance has one of its own."""
        if self.configured and not is_same_database(dialect, own := self.main.dialect.name):
            raise WrongDatabase(
                f"this session leads to {dialect}, and the tables of this outbox are in {own}: use a session on the "
                "database of the outbox, or an Outbox for each database"
            )

    def asynchronous_if(self, dialect: str) -> AsyncEngine | None:
        """The engine for a store's own work, if this instance has one for that database."""
        if not self.configured:
            return None
        main = self.main
        return main if isinstance(main, AsyncEngine) and is_same_database(main.dialect.name, dialect) else None

    def plain_if(self, dialect: str) -> Engine | None:
        """The plain engine that was given, if it leads to that kind of database."""
        given = self._settings.db_engine
        return given if isinstance(given, Engine) and is_same_database(given.dialect.name, dialect) else None

    def session(self, **options: Any) -> AsyncSession:
        """A session of our own making, safe on SQLite too."""
        return AsyncSession(self._safe, expire_on_commit=False, **options)

    def plain_session(self) -> Session:
        """The same for plain functions."""
        return Session(self.synchronous, expire_on_commit=False)

    @property
    def _safe(self) -> AsyncEngine:
        """What listeners and `transaction()` use: a given engine's transactions may not be safe."""
        engine = self.asynchronous
        if engine is not self.main:
            return engine
        own = self._loops.here()
        if own.safe is None and not own.needs_none_beside:
            safe = engine if engine is not self._settings.db_engine else _safe(engine)
            own.needs_none_beside = safe is engine
            own.safe = None if own.needs_none_beside else safe
        return own.safe or self._of_this_loop(engine)

    def _of_this_loop(self, engine: AsyncEngine) -> AsyncEngine:
        """Refuse an engine whose pool may hold connections of another event loop."""
        pool, loop = engine.pool, asyncio.get_running_loop()
        owner = self._owners.setdefault(pool, loop)
        if owner is loop or isinstance(pool, NullPool):
            return engine
        if isinstance(pool, StaticPool) and owner.is_closed():  # a database in memory, which may outlive its loop
            self._owners[pool] = loop
            return engine
        raise WrongEventLoop(
            f"{engine.url.render_as_string()} is used by another event loop, and its pool keeps connections that only "
            "that one can use. Pass db_engine_url instead of db_engine, and each loop gets connections of its own; or "
            "make an Outbox and an engine for each loop, or an engine with poolclass=NullPool; or let the other loop "
            "`await engine.dispose()` before it ends"
        )

    def check_here(self) -> None:
        """Say before any message is touched that this event loop gets no sessions."""
        self._safe  # noqa: B018

    def sessions(self, store: Store, listener: Listener) -> ListenerSessions:
        if listener.session_factory is None:
            return ListenerSessions(self, store)
        return ChosenSessions(self, store, listener)

    def elsewhere(self, url: str | URL) -> AsyncEngine:
        """An engine of our own for a listener's `session_factory`, made once for each event loop."""
        url = async_url(url)
        self.check_database(url)
        made = self._loops.here().elsewhere
        return made.get(url) or made.setdefault(url, _made(url))

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
        if not is_same_database(kind, own):
            raise ConfigurationError(
                f"session_factory leads to {kind}, and the messages are in {own}: a listener's transaction ends its "
                "message too, so both are in one database"
            )

    def forked(self) -> None:
        """In a child process: forget what was made here for the parent."""
        never_collect([self._loops, self._elsewhere_in_threads, self.__dict__.pop("synchronous", None)])
        self._loops, self._elsewhere_in_threads = LoopLocal(_EnginesOfLoop, _EnginesOfLoop.close), {}
        main = self.__dict__.get("main")
        if main is None or main is self._settings.db_engine:
            return
        self._stayed_behind = isinstance(main.pool, StaticPool) and "connection" in vars(main.pool)
        never_collect(self.__dict__.pop("main"))

    async def close(self) -> None:
        """Dispose of what was made here for this event loop and for threads, and only of that."""
        await self._loops.close()
        if "main" in self.__dict__ and isinstance(self.main, AsyncEngine) and self.main is not self._settings.db_engine:
            await self.main.dispose()  # a database in memory
        if "synchronous" in self.__dict__ and self.synchronous is not self._settings.db_engine:
            self.synchronous.dispose()
        while self._elsewhere_in_threads:
            self._elsewhere_in_threads.popitem()[1].dispose()


class _EnginesOfLoop:
    """Engines of ours that one event loop uses."""

    def __init__(self) -> None:
        self.main: AsyncEngine | None = None
        self.safe: AsyncEngine | None = None  # beside a given one whose transactions are not
        self.needs_none_beside = False  # the given one's are
        self.elsewhere: dict[URL, AsyncEngine] = {}

    async def close(self) -> None:
        """Let go of their connections. A server may not answer any more."""
        made = {engine for engine in (self.main, self.safe, *self.elsewhere.values()) if engine is not None}
        self.main = self.safe = None
        self.elsewhere.clear()
        if made:
            closing = asyncio.gather(*(engine.dispose() for engine in made), return_exceptions=True)
            await asyncio.wait([closing], timeout=DISPOSE_WITHIN)


def _safe(given: AsyncEngine) -> AsyncEngine:
    return store_class(given.dialect.name).safe_engine(given)


def _made(url: URL) -> AsyncEngine:
    try:
        return store_class(url.get_backend_name()).make_engine(url)
    except NoSuchModuleError:
        raise ConfigurationError(
            f"SQLAlchemy has no dialect {url.drivername}: install the package that brings it, or register it in the "
            "entry point group sqlalchemy.dialects"
        ) from None
    except ArgumentError:  # its text repeats the URL, which may hold a password
        raise ConfigurationError(f"not a URL that {url.drivername} can use") from None


class ListenerSessions:
    """Where a worker's listeners get their sessions."""

    def __init__(self, engines: Engines, store: Store) -> None:
        self._engines = engines
        self.store = store
        self.depend_on_message = False

    def asynchronous(self, message: Message | None) -> AsyncSession:
        return self._engines.session(close_resets_only=False)  # a listener that still has it then is too late

    def synchronous(self, message: Message | None) -> Session:
        return self._engines.plain_session()

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self.store.transactions.turn()


class ChosenSessions(ListenerSessions):
    """Sessions that a listener's `session_factory` gives."""

    def __init__(self, engines: Engines, store: Store, listener: Listener) -> None:
        super().__init__(engines, store)
        self._queue = listener.queue
        factory: Any = listener.session_factory
        self._source: Callable[[Message | None], Any] = lambda message: factory
        if isinstance(factory, str | URL):
            engines.check_database(parse_url(factory))
        elif not is_factory(factory):
            self._source = factory
            self.depend_on_message = True

    def asynchronous(self, message: Message | None) -> AsyncSession:
        source = self._source(message)
        if source is None:
            return super().asynchronous(message)
        if isinstance(source, str | URL):
            return AsyncSession(self._engines.elsewhere(source), expire_on_commit=False, close_resets_only=False)
        session = source()
        if not isinstance(session, AsyncSession):
            raise self._wrong(session, "AsyncSession")
        return session

    def synchronous(self, message: Message | None) -> Session:
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
