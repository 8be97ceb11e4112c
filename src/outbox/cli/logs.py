"""Logs: what relay and worker write to stderr. Only the command line sets logging up, never the library."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import Annotated

import typer

from outbox.cli.words import indented, lines, printable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}  # what every record has


class LogLevel(StrEnum):
    """How much is told."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a record is written."""

    TEXT = "text"
    JSON = "json"


LogFormatName = Annotated[
    LogFormat, typer.Option("--log-format", help="How to write it: a line of text, or of JSON with ids as fields.")
]
LogLevelName = Annotated[LogLevel, typer.Option("--log-level", help="How much to write to stderr.")]


class PrintableFormatter(logging.Formatter):
    """Routing keys, ids and error texts come from elsewhere: none of them begins a line of the log.

    A record is one line, in which what has no shape of its own is escaped, line breaks included. Only its traceback
    takes further lines, and they are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return indented(text) if "\n" in text else text  # without a traceback it is the message, escaped below

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in logging
        return printable(super().formatMessage(record).expandtabs(4))


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: when, how bad, what, and each attribute that it was given beside its text.

    Text is escaped before it becomes JSON, because what reads the line shows it as it was.
    """

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        given = [(name, value) for name, value in vars(record).items() if name not in _USUAL and name not in found]
        found |= {printable(name): _plain(value) for name, value in given}
        if record.exc_info:
            found["traceback"] = lines(self.formatException(record.exc_info))
        return json.dumps(found)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    return printable(str(value))


def start_logging(level: LogLevel, format: LogFormat = LogFormat.TEXT) -> None:
    """Log to stderr, unless the application's module has already said where its log goes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT) if format is LogFormat.TEXT else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def hush_clients() -> None:
    """Keep a broker's client from stderr: what it warns of, a command that looks says itself."""
    logging.getLogger("aiormq").addHandler(logging.NullHandler())
