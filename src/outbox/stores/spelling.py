"""Spelling: the few words that databases write differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, DateTime, FromClause, Insert, Select, Table, literal
from sqlalchemy.types import TypeEngine

from outbox.core.durations import EARLIEST


class Spelling(ABC):
    """What the statements of a store are built from."""

    @abstractmethod
    def now(self) -> ColumnElement[Any]:
        """The database's time when the transaction began; indexes can be searched with it."""

    @abstractmethod
    def clock(self) -> ColumnElement[Any]:
        """The database's time at this very moment."""

    @abstractmethod
    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        """A moment that many seconds after another; NULL if the seconds are."""

    @abstractmethod
    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        """How many seconds from now a moment is."""

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        """A column for a driver to read: a value that some driver could not read is `otherwise`.

        A driver that cannot read one value gives up the whole result.
        """
        return column

    def before_all(self) -> ColumnElement[Any]:
        """What is not later than any time that a row may hold."""
        return literal(EARLIEST, DateTime(timezone=True))

    @abstractmethod
    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Whether a column's value is in the list bound under this name."""

    @abstractmethod
    def listed(self, values: Sequence[Any]) -> Any:
        """The list to bind for `among`."""

    @abstractmethod
    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        """A table whose rows are the JSON list of objects bound under this name."""

    @abstractmethod
    def ignoring(self, table: Table) -> Insert:
        """An INSERT that does nothing where a unique index already has the row."""

    @abstractmethod
    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        """The last characters of a text."""

    @abstractmethod
    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        """How many bytes a column of bytes has."""

    @abstractmethod
    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        """A SELECT that locks what it finds and passes over what others have locked."""
