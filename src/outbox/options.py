"""Options: what `setup()` and `Outbox()` take, for editors and type checkers. `docs/generate.py` writes this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.backoff import RestartDelay
from outbox.core.durations import Retention, Seconds
from outbox.core.events import Observer
from outbox.core.retry import RetryDelays
from outbox.core.webhooks import AnySecrets


class Options(TypedDict, total=False):
    """What `setup()` and `Outbox()` take. An option that is None counts as not given."""

    db_engine: AsyncEngine | Engine | None
    """Your SQLAlchemy engine. It gets no events or settings from us, and we never dispose of it.
    Default: none.
    """
    db_engine_url: str | URL | None
    """Where the database is, instead of an engine: `postgresql+asyncpg://…`, `sqlite+aiosqlite:///orders.db`.
    Default: none.
    """
    schema: str | None
    """The schema of the tables; set it if yours do not live in the default one.
    Default: none.
    """
    table_name: str | None
    """The table's name; all other names derive from it. Set it for several outboxes in one database.
    Default: `outbox_table`.
    """
    transport: Any
    """Where messages go: nothing for the database itself, a URL, a Transport, or `async def publish(message)`.
    Default: the database.
    """
    rabbitmq_url: Any
    """Another name of `transport`."""
    rmq_connection_url: Any
    """Another name of `transport`."""
    rmq_connection: Any
    """Another name of `transport`."""
    routes: Mapping[str, Any] | None
    """Several destinations instead of one transport: `{"order.*": "https://…", "#": "amqp://…"}`, binding keys with
    a URL, a Transport or a function each. Each destination has its own copies, retries and dead letters.
    Default: none.
    """
    unroutable: Mapping[str, str] | None
    """Messages that no listener needs: `{"audit.#": "discard"}`. All others wait until a queue is bound to them.
    Default: none.
    """
    exchange_name: str | None
    """RabbitMQ's exchange; the names of its other exchanges and of the delay queues begin with it. Set it for
    several outboxes in one virtual host.
    Default: `outbox`.
    """
    queue_prefix: str | None
    """What the names of RabbitMQ's queues begin with, before a listener's own `queue`. Set it if several
    environments share a virtual host.
    Default: none.
    """
    rabbitmq_management_url: str | None
    """RabbitMQ's management interface: `http://user:password@host:15672`. If it is set, `backlog()`, `outbox status`
    and `outbox queues list` count all queues, with what workers hold, and a worker that starts tells of all
    bindings that its listeners do not ask for, or removes them with `rebind_queues`; without it, of those that
    workers of this database have made. It is asked directly, without a proxy, and redirects are not followed.
    Default: none; `outbox doctor`, `dead-letters` and `queues rebind` try port 15672 of the broker's host, or
    15671 with TLS.
    """
    source: str | None
    """The `source` of CloudEvents over HTTP: a URI or the path of one, such as `/shop`. Receivers identify a message
    by source and id: after a change of source a repeated message looks new to them.
    Default: `/`, the database's name, `/`, the table's name.
    """
    rebind_queues: bool | None
    """A worker or relay that starts removes the binding keys of its queues or routes that no listener or route of
    its own asks for. Set it where all processes of a queue always have the same declaration: the one that starts
    last decides. On RabbitMQ it needs `rabbitmq_management_url`, or a database: then it removes what workers of
    this database have bound.
    Default: `False`.
    """
    service: str | None
    """The name of your service, recorded with each queue that its workers serve. A worker of another service that
    serves the same queue says so when it starts: each would get a part of the messages.
    Default: the top-level package of the listeners.
    """
    webhook_secrets: AnySecrets | None
    """Secrets that sign what is sent over HTTP, `whsec_…`: one, or several while they are changed. The variable has
    commas between them; `OUTBOX_WEBHOOK_SECRETS_FILE` names a file that holds them instead.
    Default: none: nothing is signed.
    """
    poll_interval: Seconds | None
    """Longest time between two polls of the table. Notifications arrive sooner; lower it where they are not
    available, for example behind PgBouncer.
    Default: 1 s.
    """
    sync_wakeups: bool | None
    """Whether commits without an event loop wake other processes on PostgreSQL, from a daemon thread and a
    connection that the first of them makes. Set it to False where a process may have neither; messages are found
    within `poll_interval` then.
    Default: `True`.
    """
    relay_from: str | None
    """How a relay finds messages: `table` polls, `wal` tails PostgreSQL's log, or is woken by it. See `outbox wal`.
    Default: `table`.
    """
    wal_url: str | None
    """The database as the role that reads the write-ahead log reaches it, if not by `db_engine_url`: it needs
    REPLICATION, and no pooler in between.
    Default: the database's URL.
    """
    wal_slot: str | None
    """The replication slot and the publication. Slots are unique on a server: set it if the derived name is taken.
    Default: from the names of database and table.
    """
    slot_in_use_delay: Seconds | None
    """Pause of a relay that stands by while another one has the slot. After other errors it is `restart_delay`.
    Default: 1 s.
    """
    batch_size: int | None
    """Messages that a relay claims at once; fewer where their bodies have more than 8 MiB. Lower it if answers of a
    destination take seconds.
    Default: 500.
    """
    prefetch_count: int | None
    """Most messages of one queue that a worker takes ahead (prefetch). It takes that many only while it handles them
    quickly. Suspected poison messages that wait at RabbitMQ come on top.
    Default: 2000.
    """
    lease: Seconds | None
    """How long a claim is valid unless it is renewed (visibility timeout). It is renewed at a third: it bounds how
    late a dead worker's messages are redelivered, not how long a listener may run.
    Default: 60 s.
    """
    grace: Seconds | None
    """Shutdown timeout: how long listeners may go on after SIGTERM.
    Default: 30 s.
    """
    retry_delays: RetryDelays | None
    """Delays between a listener's attempts: a sequence, a RetryPolicy, or a function. `()` means no retries.
    Default: `(1, 10, 60, 300)`.
    """
    relay_retry_delays: RetryDelays | None
    """Delays between a relay's attempts at a message that the destination refused.
    Default: exponential from 1 s to 5 min, with jitter, without end.
    """
    restart_delay: RestartDelay | None
    """Backoff of a relay or worker after an error of its database or broker: a duration, or a function of how many
    errors came in a row and of the last one.
    Default: from 0.2 s, doubling up to 10 s or, for a relay, 30 s; over HTTP from 1 s to 7.5 s.
    """
    expiration: Seconds | None
    """Time to live of messages, from when they are due. Past it they are dead letters.
    Default: none.
    """
    clean_up_after: Retention | None
    """How long done messages are kept: `IMMEDIATELY`, `NEVER`, or a timedelta. Keep them to see their history.
    Default: `IMMEDIATELY`.
    """
    inbox_retention: Retention | None
    """How long handled message ids (idempotency keys) are kept. An older message becomes a dead letter instead of
    being handled again.
    Default: 30 days.
    """
    fresh_dead_letters: Seconds | None
    """`outbox doctor` reports dead letters that are younger, as an error. Set it to the time in which a person looks
    at its result; 0 reports none.
    Default: 1 h.
    """
    max_body_size: int | None
    """Largest body in bytes, up to 64 MiB.
    Default: 1 MiB.
    """
    redact_error: Callable[[str], str] | None
    """Called with each error text before it is stored; returns what may be kept of it.
    Default: none.
    """
    observers: Sequence[Observer] | None
    """Functions that are called with every event, beside the log: for metrics and traces.
    Default: none.
    """
    log: bool | None
    """Whether events are logged under the name `outbox`. Switch it off if observers of yours do all of it.
    Default: `True`.
    """
