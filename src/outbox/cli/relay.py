"""`outbox relay`: sends stored messages to the transport."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outbox.cli.logs import LogFormat, LogFormatName, LogLevel, LogLevelName, start_logging
from outbox.cli.serving import serve
from outbox.cli.targets import OutboxName, find_outbox
from outbox.core.log import FEEDS

FeedChoice = StrEnum("FeedChoice", [(name.upper(), name) for name in FEEDS])  # type: ignore[misc]
FeedName = Annotated[
    FeedChoice | None,
    typer.Option("--from", help="Poll the table, or read PostgreSQL's write-ahead log; without it as relay_from says."),
]


def relay(
    feed: FeedName = None,
    outbox_name: OutboxName = "",
    log_level: LogLevelName = LogLevel.INFO,
    log_format: LogFormatName = LogFormat.TEXT,
) -> None:
    """Hand stored messages to the transport until SIGINT or SIGTERM.

    Where the database is the transport, a worker does this by itself; a relay beside it does no harm. With --from wal
    messages go out in commit order, milliseconds after the commit; a second such relay stands by. With the database as
    the transport, and with routes, it wakes workers and relays instead. See outbox wal.
    """
    outbox = find_outbox(outbox_name)
    if feed is not None:
        outbox.setup(relay_from=str(feed))
    start_logging(log_level, log_format)
    serve(outbox)
