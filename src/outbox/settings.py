"""Settings: every option once, with its default and its spellings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.backoff import RestartDelay, check_restart_delay
from outbox.core.binding import check_name
from outbox.core.cloudevents import check_source
from outbox.core.durations import IMMEDIATELY, NEVER, Retention, Seconds, as_delay, as_lifetime, parse_duration
from outbox.core.errors import ConfigurationError, TimeInvalid
from outbox.core.events import Observer
from outbox.core.log import check_log_settings
from outbox.core.message import LARGEST_BODY, LARGEST_READ
from outbox.core.retry import RetryDelays, RetryPolicy, as_retry_policy
from outbox.core.urls import check_credentials
from outbox.core.webhooks import AnySecrets, Secrets
from outbox.environment import (
    by_first_name,
    checked_routes,
    checked_unroutable,
    durations,
    json_object,
    option,
    read,
    report_unknown,
    retention,
    secrets,
    truth,
    whole_number,
)
from outbox.stores.tables import LONGEST_SCHEMA, LONGEST_TABLE, check_identifier

# SQLAlchemy 2.0 keeps the name of a database as it stands in the URL, 2.1 decodes it.
_NAMES_STAY_ENCODED = make_url("sqlite:///a%20b").database == "a%20b"

# Two ways to say the same thing: one in code takes the place of the other from the environment or an earlier setup().
_INSTEAD = {
    "db_engine": "db_engine_url",
    "db_engine_url": "db_engine",
    "transport": "routes",
    "routes": "transport",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """What `setup()` takes. Each option can also be given as `OUTBOX_…` in the environment, except objects."""

    db_engine: AsyncEngine | Engine | None = option(
        None, "Your SQLAlchemy engine. It gets no events or settings from us, and we never dispose of it."
    )
    db_engine_url: str | URL | None = option(
        None,
        "Where the database is, instead of an engine: `postgresql+asyncpg://…`, `sqlite+aiosqlite:///orders.db`.",
        parse=str,
    )
    schema: str | None = option(
        None, "The schema of the tables; set it if yours do not live in the default one.", parse=str
    )
    table_name: str = option(
        "outbox_table",
        "The table's name; all other names derive from it. Set it for several outboxes in one database.",
        parse=str,
    )
    transport: Any = option(
        None,
        "Where messages go: nothing for the database itself, a URL, a Transport, or `async def publish(message)`.",
        spellings=("rabbitmq_url", "rmq_connection_url", "rmq_connection"),
        shown="the database",
        parse=str,
    )
    routes: Mapping[str, Any] = option(
        None,
        'Several destinations instead of one transport: `{"order.*": "https://…", "#": "amqp://…"}`, binding keys with '
        "a URL, a Transport or a function each. Each destination has its own copies, retries and dead letters.",
        shown="none",
        parse=json_object('{"order.*": "https://…"}'),
    )
    unroutable: Mapping[str, str] = option(
        None,
        'Messages that no listener needs: `{"audit.#": "discard"}`. All others wait until a queue is bound to them.',
        shown="none",
        parse=json_object('{"audit.#": "discard"}'),
    )
    exchange_name: str = option(
        "outbox",
        "RabbitMQ's exchange; the names of its other exchanges and of the delay queues begin with it. Set it for "
        "several outboxes in one virtual host.",
        parse=str,
    )
    queue_prefix: str = option(
        "",
        "What the names of RabbitMQ's queues begin with, before a listener's own `queue`. Set it if several "
        "environments share a virtual host.",
        shown="none",
        parse=str,
    )
    rabbitmq_management_url: str = option(
        "",
        "RabbitMQ's management interface: `http://user:password@host:15672`. If it is set, `backlog()`, `outbox "
        "status` and `outbox queues list` count all queues, with what workers hold, and a worker that starts tells of "
        "all bindings that its listeners do not ask for, or removes them with `rebind_queues`; without it, of those "
        "that workers of this database have made. It is asked directly, without a proxy, and redirects are not "
        "followed.",
        shown="none; `outbox doctor`, `dead-letters` and `queues rebind` try port 15672 of the broker's host, or 15671 "
        "with TLS",
        parse=str,
    )
    source: str | None = option(
        None,
        "The `source` of CloudEvents over HTTP: a URI or the path of one, such as `/shop`. Receivers identify a "
        "message by source and id: after a change of source a repeated message looks new to them.",
        shown="`/`, the database's name, `/`, the table's name",
        parse=str,
    )
    rebind_queues: bool = option(
        False,
        "A worker or relay that starts removes the binding keys of its queues or routes that no listener or route of "
        "its own asks for. Set it where all processes of a queue always have the same declaration: the one that "
        "starts last decides. On RabbitMQ it needs `rabbitmq_management_url`, or a database: then it removes what "
        "workers of this database have bound.",
        parse=truth,
    )
    service: str | None = option(
        None,
        "The name of your service, recorded with each queue that its workers serve. A worker of another service that "
        "serves the same queue says so when it starts: each would get a part of the messages.",
        shown="the top-level package of the listeners",
        parse=str,
    )
    webhook_secrets: AnySecrets | None = option(
        None,
        "Secrets that sign what is sent over HTTP, `whsec_…`: one, or several while they are changed. The variable "
        "has commas between them; `OUTBOX_WEBHOOK_SECRETS_FILE` names a file that holds them instead.",
        shown="none: nothing is signed",
        parse=secrets,
        in_file=True,
    )
    poll_interval: Seconds = option(
        1.0,
        "Longest time between two polls of the table. Notifications arrive sooner; lower it where they are not "
        "available, for example behind PgBouncer.",
        parse=parse_duration,
    )
    sync_wakeups: bool = option(
        True,
        "Whether commits without an event loop wake other processes on PostgreSQL, from a daemon thread and a "
        "connection that the first of them makes. Set it to False where a process may have neither; messages are found "
        "within `poll_interval` then.",
        parse=truth,
    )
    relay_from: str = option(
        "table",
        "How a relay finds messages: `table` polls, `wal` tails PostgreSQL's log, or is woken by it. See `outbox wal`.",
        parse=str,
    )
    wal_url: str | None = option(
        None,
        "The database as the role that reads the write-ahead log reaches it, if not by `db_engine_url`: it needs "
        "REPLICATION, and no pooler in between.",
        shown="the database's URL",
        parse=str,
    )
    wal_slot: str | None = option(
        None,
        "The replication slot and the publication. Slots are unique on a server: set it if the derived name is taken.",
        shown="from the names of database and table",
        parse=str,
    )
    slot_in_use_delay: Seconds = option(
        1.0,
        "Pause of a relay that stands by while another one has the slot. After other errors it is `restart_delay`.",
        parse=parse_duration,
    )
    batch_size: int = option(
        500,
        "Messages that a relay claims at once; fewer where their bodies have more than 8 MiB. Lower it if answers of a "
        "destination take seconds.",
        parse=whole_number,
    )
    prefetch_count: int = option(
        2000,
        "Most messages of one queue that a worker takes ahead (prefetch). It takes that many only while it handles "
        "them quickly. Suspected poison messages that wait at RabbitMQ come on top.",
        parse=whole_number,
    )
    lease: Seconds = option(
        60.0,
        "How long a claim is valid unless it is renewed (visibility timeout). It is renewed at a third: it bounds "
        "how late a dead worker's messages are redelivered, not how long a listener may run.",
        parse=parse_duration,
    )
    grace: Seconds = option(30.0, "Shutdown timeout: how long listeners may go on after SIGTERM.", parse=parse_duration)
    retry_delays: RetryDelays = option(
        (1, 10, 60, 300),
        "Delays between a listener's attempts: a sequence, a RetryPolicy, or a function. `()` means no retries.",
        parse=durations,
    )
    relay_retry_delays: RetryDelays = option(
        None,
        "Delays between a relay's attempts at a message that the destination refused.",
        shown="exponential from 1 s to 5 min, with jitter, without end",
        parse=durations,
    )
    restart_delay: RestartDelay | None = option(
        None,
        "Backoff of a relay or worker after an error of its database or broker: a duration, or a function of how "
        "many errors came in a row and of the last one.",
        shown="from 0.2 s, doubling up to 10 s or, for a relay, 30 s; over HTTP from 1 s to 7.5 s",
        parse=parse_duration,
    )
    expiration: Seconds | None = option(
        None,
        "Time to live of messages, from when they are due. Past it they are dead letters.",
        parse=parse_duration,
    )
    clean_up_after: Retention = option(
        IMMEDIATELY,
        "How long done messages are kept: `IMMEDIATELY`, `NEVER`, or a timedelta. Keep them to see their history.",
        parse=retention,
    )
    inbox_retention: Retention = option(
        timedelta(days=30),
        "How long handled message ids (idempotency keys) are kept. An older message becomes a dead letter instead of "
        "being handled again.",
        shown="30 days",
        parse=retention,
    )
    fresh_dead_letters: Seconds = option(
        3600.0,
        "`outbox doctor` reports dead letters that are younger, as an error. Set it to the time in which a person "
        "looks at its result; 0 reports none.",
        shown="1 h",
        parse=parse_duration,
    )
    max_body_size: int = option(LARGEST_BODY, "Largest body in bytes, up to 64 MiB.", shown="1 MiB", parse=whole_number)
    redact_error: Callable[[str], str] | None = option(
        None, "Called with each error text before it is stored; returns what may be kept of it."
    )
    observers: Sequence[Observer] = option(
        None, "Functions that are called with every event, beside the log: for metrics and traces.", shown="none"
    )
    log: bool = option(
        True,
        "Whether events are logged under the name `outbox`. Switch it off if observers of yours do all of it.",
        parse=truth,
    )

    @classmethod
    def of(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """Settings from arguments, then from the environment, then the defaults."""
        report_unknown(cls, environment)
        values = by_first_name(cls, given)
        said = frozenset(values)
        for each in fields(cls):
            if values.get(each.name) is None:
                values.pop(each.name, None)
                read(each, environment, values)
        for one, other in _INSTEAD.items():
            if one in said and other not in said:
                values.pop(other, None)
        return cls(**values)

    def __post_init__(self) -> None:
        if self.db_engine is not None and self.db_engine_url is not None:
            raise ConfigurationError("db_engine and db_engine_url are two ways to say the same: give one of them")
        if self.db_engine is not None and not isinstance(self.db_engine, AsyncEngine | Engine):
            raise ConfigurationError(f"db_engine={type(self.db_engine).__name__}: an AsyncEngine or Engine")
        if self.db_engine_url is not None and not isinstance(self.db_engine_url, str | URL):
            raise ConfigurationError(f"db_engine_url={type(self.db_engine_url).__name__}: a URL")
        if self.transport is not None and self.routes:
            raise ConfigurationError("transport and routes are two ways to say where messages go: give one of them")
        for name, longest in (("table_name", LONGEST_TABLE), ("schema", LONGEST_SCHEMA)):
            if getattr(self, name) is not None:
                check_identifier(getattr(self, name), name, longest)
        check_name(self.exchange_name, "exchange_name")
        if self.queue_prefix != "":
            check_name(self.queue_prefix, "queue_prefix")
        if self.source is not None:
            check_source(self.source)
        if self.service is not None:
            check_name(self.service, "service")
        if self.webhook_secrets is not None:
            self._set("webhook_secrets", Secrets.of(self.webhook_secrets))
        for name in ("poll_interval", "lease", "slot_in_use_delay", "expiration"):
            if getattr(self, name) is not None:
                self._set(name, self._checked(name, as_lifetime))
        for name in ("grace", "fresh_dead_letters"):
            self._set(name, self._checked(name, as_delay))
        for name in ("batch_size", "prefetch_count", "max_body_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: a whole number, at least 1")
        if self.max_body_size > LARGEST_READ:
            raise ConfigurationError(
                f"max_body_size={self.max_body_size}: at most {LARGEST_READ}; store what is larger elsewhere, and emit "
                "where it is"
            )
        for name in ("clean_up_after", "inbox_retention"):
            self._check_retention(name)
        if self.redact_error is not None and not callable(self.redact_error):
            raise ConfigurationError("redact_error is a function of the error's text")
        observers = self.observers
        if observers is not None and not (isinstance(observers, Sequence) and all(map(callable, observers))):
            raise ConfigurationError("observers is a list of functions of an event")
        for name in ("sync_wakeups", "log", "rebind_queues"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: True or False")
        self._set("retry_delays", as_retry_policy(self.retry_delays))
        relay = self.relay_retry_delays
        endless = RetryPolicy.exponential(1, 2, cap=timedelta(minutes=5), jitter=0.2)
        self._set("relay_retry_delays", endless if relay is None else as_retry_policy(relay))
        if self.restart_delay is not None:
            check_restart_delay(self.restart_delay)
        self._set("unroutable", checked_unroutable(self.unroutable))
        self._set("routes", checked_routes(self.routes))
        check_log_settings(self.relay_from, self.wal_slot, self.wal_url)
        self._check_rebinding()
        self._check_credentials()

    def __repr__(self) -> str:
        """Names only what is safe to show: URLs and engines may hold credentials."""
        return f"Settings(table_name={self.table_name!r}, schema={self.schema!r})"

    @property
    def usual_source(self) -> str:
        """What all processes that share the table have in common, as the source of CloudEvents."""
        try:
            url = self.db_engine.url if self.db_engine is not None else make_url(self.db_engine_url or "sqlite://")
        except (ArgumentError, ValueError):
            return "/outbox"  # what is no URL is refused where the database is used, without showing it
        table = self.table_name if self.schema is None else f"{self.schema}.{self.table_name}"
        name = Path(url.database or "memory").name
        return f"/{quote(unquote(name) if _NAMES_STAY_ENCODED else name)}/{quote(table)}"

    @property
    def seconds_between_looks(self) -> float:
        return as_lifetime(self.poll_interval).total_seconds()

    def duration(self, name: str) -> timedelta:
        """An option that is a duration."""
        value: timedelta = getattr(self, name)
        return value

    def policy(self, name: str) -> RetryPolicy:
        """An option that is a retry policy."""
        value: RetryPolicy = getattr(self, name)
        return value

    def _checked(self, name: str, check: Callable[..., timedelta]) -> timedelta:
        try:
            return check(getattr(self, name), what=name)
        except TimeInvalid as error:
            raise ConfigurationError(str(error)) from None

    def _check_retention(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and value.upper() in (IMMEDIATELY, NEVER):
            value = value.upper()
            self._set(name, value)
        elif not isinstance(value, timedelta) or value < timedelta(0):
            raise ConfigurationError(f"{name}={value!r}: IMMEDIATELY, NEVER, or a timedelta")
        if name == "inbox_retention" and value in (IMMEDIATELY, timedelta(0)):
            raise ConfigurationError("inbox_retention=IMMEDIATELY would forget a message before its copy arrives")

    def _check_rebinding(self) -> None:
        at_rabbitmq = isinstance(self.transport, str) and self.transport.startswith(("amqp:", "amqps:"))
        has_database = self.db_engine is not None or self.db_engine_url is not None
        if self.rebind_queues and at_rabbitmq and not (self.rabbitmq_management_url or has_database):
            raise ConfigurationError(
                "rebind_queues=True needs rabbitmq_management_url, or a database in which workers record what they "
                "bind: AMQP does not tell what a queue is bound to"
            )

    def _check_credentials(self) -> None:
        places = {"transport": self.transport, **{f"the route of {key!r}": to for key, to in self.routes.items()}}
        for name, value in places.items():
            if isinstance(value, str) and value.startswith(("amqp:", "amqps:")):
                check_credentials(value, name)
        check_credentials(self.rabbitmq_management_url, "rabbitmq_management_url")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def on_top(earlier: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an earlier `setup()` with those of a later one, all under their first names."""
    later = by_first_name(Settings, given)
    return {name: value for name, value in earlier.items() if _INSTEAD.get(name) not in later} | later
