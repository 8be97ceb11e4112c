"""Adapters: which store serves a database, which transport a URL. Both are open to third parties by entry points."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import entry_points, metadata, requires
from importlib.util import find_spec
from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.core.errors import ConfigurationError
from outbox.core.events import Observer
from outbox.core.store import IN_DATABASE, StoreClass
from outbox.core.transport import Defaults, Route, Transport
from outbox.settings import Settings
from outbox.transports.function import FunctionTransport
from outbox.transports.routes import RouteObserver, Routes, route_name, url_without_secrets

STORES = "outbox.stores"  # the entry point group; names are SQLAlchemy's names of dialects
TRANSPORTS = "outbox.transports"  # names are URL schemes, or modules whose connections are taken

_DEFAULTS = Defaults()
_loaded: dict[tuple[str, str], Any] = {}  # by group and name: to look through all that is installed takes milliseconds
_EXTRA = re.compile(r"(?P<distribution>[\w.-]+).*; extra == ['\"](?P<extra>\w+)['\"]")  # of what we require
_BROUGHT_BY = {"aiormq": "aio-pika", "pamqp": "aio-pika"}  # modules of distributions that an extra brings along
_DRIVER_MODULES = {"pysqlite": "sqlite3", "mysqldb": "MySQLdb"}  # where a driver's name is not its module's


def store_class(dialect: str) -> StoreClass:
    """The store for a database, by the name of its SQLAlchemy dialect."""
    found: StoreClass = _load(STORES, dialect, "no store for the database {name!r}; there are: {known}")
    return found


def is_same_database(dialect: str, other: str) -> bool:
    """Whether two of SQLAlchemy's names are served by one store: a kind of server may have several."""
    return dialect == other or store_class(dialect) is store_class(other)


def defaults_of(settings: Settings, observe: Observer) -> Defaults:
    """What the settings say to a transport. Of those that belong to single transports each takes its own."""
    values = {option.name: getattr(settings, option.name) for option in fields(settings)}
    return Defaults(
        retry_policy=settings.policy("retry_delays"),
        observe=observe,
        max_body_size=settings.max_body_size,
        settings=values | {"source": settings.source or settings.usual_source},
    )


def transport_for(value: object, defaults: Defaults = _DEFAULTS) -> Transport:
    """A transport from a URL, a client library's connection, a function, or a transport itself."""
    if isinstance(value, str):
        scheme, colon, _ = value.partition(":")
        unknown = "no transport for {name}:// URLs is installed" if colon else "no URL: write for example https://…"
        make: Callable[[object, Defaults], Transport] = _load(TRANSPORTS, scheme, f"{unknown}; there are: {{known}}")
        return make(value, defaults)
    if isinstance(value, Transport):
        if not getattr(value, "name", ""):
            raise ConfigurationError(
                f"transport={type(value).__name__}: it needs a `name`, one word, such as its scheme"
            )
        value.adopt(defaults)
        return value
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None)):  # noqa: B004
        return FunctionTransport(value)  # type: ignore[arg-type]
    library = _client_library(value)
    if library is not None:
        make = _load(TRANSPORTS, library, "no transport for connections of {name} is installed; there are: {known}")
        return make(value, defaults)
    if hasattr(value, "publish"):
        raise ConfigurationError(
            f"transport={type(value).__name__}: its class has a method publish and is no Transport; let it inherit "
            "outbox.extend.Transport"
        )
    raise ConfigurationError(f"transport={type(value).__name__}: a URL, a Transport, or `async def publish(message)`")


def routes_for(values: Mapping[str, object], defaults: Defaults = _DEFAULTS) -> Routes:
    """The destinations that routes name, each once, with all binding keys that lead to it."""
    if len(_brokers(values.values())) > 1:  # whose interface the setting names is not known
        defaults = replace(defaults, settings={**defaults.settings, "rabbitmq_management_url": ""})
    found: dict[str, tuple[object, Transport]] = {}
    binding_keys: defaultdict[str, list[str]] = defaultdict(list)
    for binding_key, value in values.items():
        name = next((name for name, (known, _) in found.items() if known is value or known == value), None)
        if name is None:
            observe = RouteObserver(defaults.observe)
            try:
                transport = transport_for(value, replace(defaults, observe=observe))
                name = observe.route = route_name(value, transport)
            except ConfigurationError as error:
                raise ConfigurationError(f"the route of {binding_key!r}: {error}") from None
            if name in found:
                raise ConfigurationError(
                    f"two routes are called {name!r}: their messages could not be told apart. Give one of them a "
                    "transport with a `route` of its own"
                )
            found[name] = (value, transport)
        binding_keys[name].append(binding_key)
    return Routes([Route(name, transport, tuple(binding_keys[name])) for name, (_, transport) in found.items()])


def _brokers(values: Iterable[object]) -> set[str]:
    """The hosts, with their ports, of those that are RabbitMQ."""
    urls = [getattr(value, "address", value) for value in values]
    places = [url.partition("://")[2] for url in urls if isinstance(url, str) and url.startswith(("amqp:", "amqps:"))]
    return {place.rpartition("@")[2].partition("/")[0] for place in places}


def installed_stores() -> list[str]:
    """The databases that there is a store for, by the names of SQLAlchemy's dialects."""
    return sorted({point.name for point in entry_points(group=STORES)})


def installed_transports() -> set[str]:
    """The names by which tables know their transports, of all that are installed."""
    names = {IN_DATABASE, FunctionTransport.name, Routes.name}
    for point in entry_points(group=TRANSPORTS):
        with suppress(ImportError):  # what it needs is not installed
            make = point.load()
            names.add(getattr(getattr(make, "__self__", make), "name", point.name))
    return names


def address_of(value: object, transport: Transport) -> str | None:
    """Where a transport leads, without what is secret; None if neither it nor its URL tells."""
    if transport.address:
        return transport.address
    return url_without_secrets(value) if isinstance(value, str) and "://" in value else None


def _client_library(value: object) -> str | None:
    """The name of the library whose connection this is, if a transport takes its connections."""
    known = {point.name for point in entry_points(group=TRANSPORTS)}
    modules = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((module for module in modules if module in known), None)


def async_url(text: str | URL) -> URL:
    """A database URL with a driver for the event loop."""
    url = parse_url(text)
    return _with_driver(url, store_class(url.get_backend_name()).async_drivers)


def sync_url(url: URL) -> URL:
    """The same database with a driver for threads."""
    return _with_driver(url, store_class(url.get_backend_name()).sync_drivers)


def installed_drivers() -> dict[str, list[str]]:
    """The drivers that are installed, by the database that they are for."""
    classes = {point.name: store_class(point.name) for point in entry_points(group=STORES)}
    return {
        name: [driver for driver in dict.fromkeys((*found.async_drivers, *found.sync_drivers)) if _is_installed(driver)]
        for name, found in sorted(classes.items())
    }


def parse_url(text: str | URL) -> URL:
    """A database URL; an error does not repeat it, because it may hold a password."""
    try:
        url = text if isinstance(text, URL) else make_url(re.sub("^postgres://", "postgresql://", text))
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "db_engine_url is not a database URL: write for example postgresql+asyncpg://user:password@host/database "
            "or sqlite+aiosqlite:///orders.db"
        ) from None
    cut = isinstance(text, str) and "@" in text.partition("?")[0] and "@" in text.partition("?")[2]
    if url.host is not None and (cut or any("@" in part for part in (url.host, url.database or "", *url.query))):
        # What is behind the first @ of a password would be shown as a host or a database.
        raise ConfigurationError("db_engine_url has more than one @: in a password write @ as %40")
    return url


def _with_driver(url: URL, drivers: tuple[str, ...]) -> URL:
    backend, _, driver = url.drivername.partition("+")
    if driver in drivers:
        if not _is_installed(driver):
            raise _missing(backend, (driver,))
        return url
    for wanted in drivers:
        if _is_installed(wanted):
            return url.set(drivername=f"{backend}+{wanted}")
    raise _missing(backend, drivers, f"{driver} cannot be used here, and no other driver" if driver else "no driver")


def _is_installed(driver: str) -> bool:
    return find_spec(_DRIVER_MODULES.get(driver, driver)) is not None


def _missing(backend: str, drivers: tuple[str, ...], none: str = "no driver") -> ConfigurationError:
    extras = metadata("transactional-outbox").get_all("Provides-Extra") or []
    package = f"'transactional-outbox[{drivers[0]}]'" if drivers[0] in extras else drivers[0]
    needed = drivers[0] if len(drivers) == 1 else f"one of {', '.join(drivers)}"
    return ConfigurationError(
        f"{none} for {backend} is installed: {needed} is needed, for example pip install {package}"
    )


def _load(group: str, name: str, missing: str) -> Any:
    if (group, name) in _loaded:
        return _loaded[group, name]
    found = entry_points(group=group)
    for point in found:
        if point.name == name:
            try:
                _loaded[group, name] = loaded = point.load()
            except ImportError as error:
                advice = _installation(error.name or "")
                raise ConfigurationError(f"{name} needs a module that is not installed: {error}{advice}") from error
            return loaded
    known = ", ".join(sorted(point.name for point in found)) or "none"
    raise ConfigurationError(missing.format(name=name, known=known))


def _installation(module: str) -> str:
    """How to install a module, if it comes with an extra of ours."""
    name = module.partition(".")[0]
    distribution = _BROUGHT_BY.get(name, name.replace("_", "-"))
    for requirement in requires("transactional-outbox") or ():
        found = _EXTRA.match(requirement)
        if found is not None and found["distribution"] == distribution:
            return f"; run: pip install 'transactional-outbox[{found['extra']}]'"
    return ""
