"""Exits: how a command ended, as a number for scripts and as one line for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self

import typer
from sqlalchemy.exc import ArgumentError

from outbox.cli.secrets import redacted
from outbox.cli.words import indented
from outbox.core.errors import ConfigurationError, DatabaseSilent, OutboxError, TransportUnavailable


class ExitCode(IntEnum):
    """Every code that the command ends with."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    FINE = 0, "success"
    WRONG = 1, "not found, nothing to do, or wrong numbers at the end of demo"
    USAGE = 2, "wrong usage: see --help"
    CONFIGURATION = 3, "the configuration cannot work; the line on stderr says what to change"
    UNREACHABLE = 4, "the database, or a broker, cannot be reached"
    ABANDONED = 5, "the grace ended before the listeners did; their messages are tried again"
    UNHEALTHY = 6, "tables check found a difference, or doctor found an error"
    FORCED = 130, "like 5, because of a second signal"


def in_words() -> str:
    """The codes, for the end of the help. The \\b keeps their lines from being filled up to a paragraph."""
    return "\n".join(["\b", "Exit codes:", *(f"{code.value:>5}  {code.meaning}" for code in ExitCode)])


class Failure(Exception):
    """Ends the command with this code and this line."""

    def __init__(self, code: ExitCode, line: str) -> None:
        super().__init__(line)
        self.code = code
        self.line = line


@contextmanager
def reported() -> Iterator[None]:
    """Turn what the library raises on purpose into a line on stderr and a code."""
    try:
        yield
    except Failure as failure:
        end(failure.code, failure.line)
    except ConfigurationError as error:
        end(ExitCode.CONFIGURATION, str(error))
    except ArgumentError as error:  # SQLAlchemy's word for a URL or an option that it cannot use
        end(ExitCode.CONFIGURATION, str(error).splitlines()[0])
    except (TransportUnavailable, DatabaseSilent) as error:
        end(ExitCode.UNREACHABLE, str(error))
    except OutboxError as error:
        end(ExitCode.WRONG, str(error))


def end(code: ExitCode, line: str) -> None:
    """Say why, and leave."""
    sys.stdout.flush()
    print(f"error: {indented(redacted(line))}", file=sys.stderr)
    raise typer.Exit(code)
