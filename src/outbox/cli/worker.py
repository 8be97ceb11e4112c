"""`outbox worker`: runs listeners."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox.cli.logs import LogFormat, LogFormatName, LogLevel, LogLevelName, start_logging
from outbox.cli.serving import serve
from outbox.cli.targets import ListenersName, OutboxName, find_listeners, find_outbox

Leftovers = Annotated[
    bool, typer.Option("--leftovers", help="Serve what lies in queues of a transport that the table belonged to.")
]

StoreFirst = Annotated[
    bool, typer.Option("--store-first", help="Store a broker's deliveries in the database and handle them from there.")
]


def worker(
    listeners_name: ListenersName,
    leftovers: Leftovers = False,
    store_first: StoreFirst = False,
    outbox_name: OutboxName = "",
    log_level: LogLevelName = LogLevel.INFO,
    log_format: LogFormatName = LogFormat.TEXT,
) -> None:
    """Serve listeners until SIGINT or SIGTERM, for example: outbox worker shop.listeners:all_listeners

    The module is imported from this folder too; the setup() in it, or OUTBOX_DB_ENGINE_URL, says where the database is.

    On the first signal nothing new is started and running listeners get their grace (OUTBOX_GRACE, 30 s). Those that
    are still running then, or at a second signal, are abandoned: their messages are tried again.

    With --leftovers it routes nothing, and the table may belong to another transport by now: that is how a move to
    another transport ends.

    With --store-first it does for all listeners what store_first=True does for one.
    """
    listeners = find_listeners(listeners_name)
    outbox = find_outbox(outbox_name)
    start_logging(log_level, log_format)
    serve(outbox, listeners, leftovers=leftovers, store_first=store_first)
