"""`outbox relay`: hands stored messages on."""

from __future__ import annotations

from outbox.cli.logs import LogFormat, LogFormatName, LogLevel, LogLevelName, start_logging
from outbox.cli.serving import serve
from outbox.cli.targets import OutboxName, find_outbox


def relay(
    outbox_name: OutboxName = "",
    log_level: LogLevelName = LogLevel.INFO,
    log_format: LogFormatName = LogFormat.TEXT,
) -> None:
    """Hand stored messages to the transport until SIGINT or SIGTERM.

    Where the database is the transport, a worker does this by itself; a relay beside it does no harm.
    """
    outbox = find_outbox(outbox_name)
    start_logging(log_level, log_format)
    serve(outbox)
