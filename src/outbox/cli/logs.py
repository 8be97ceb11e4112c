"""Logs: what relay and worker write to stderr. Only the command line sets logging up, never the library."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer

from outbox.cli.words import indented, printable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLevel(StrEnum):
    """How much is told."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="How much to write to stderr.")]


class PrintableFormatter(logging.Formatter):
    """Routing keys, ids and error texts come from elsewhere: none of them begins a line of the log.

    A record is one line, in which what has no shape of its own is escaped, line breaks included. Only its traceback
    takes further lines, and they are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in logging
        return printable(super().formatMessage(record).expandtabs(4))


def start_logging(level: LogLevel) -> None:
    """Log to stderr, unless the application's module has already said where its log goes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def hush_clients() -> None:
    """Keep a broker's client from stderr: what it warns of, a command that looks says itself."""
    logging.getLogger("aiormq").addHandler(logging.NullHandler())
