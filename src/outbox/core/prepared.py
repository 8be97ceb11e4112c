"""Prepared: a store's statement as a driver takes it, compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects import registry

Parameters = tuple[Any, ...]
SchemaNames = tuple[tuple[str | None, str | None], ...]  # of tables, and what to write instead


@dataclass(frozen=True, slots=True)
class Prepared:
    """A statement as a driver takes it, and how a row becomes its parameters."""

    text: str
    constants: Mapping[str, Any]
    processors: Sequence[tuple[str, Callable[[Any], Any]]]
    in_order: Callable[[Mapping[str, Any]], Parameters]

    def parameters(self, row: Mapping[str, Any]) -> Parameters:
        values = {**self.constants, **row}
        for name, process in self.processors:
            values[name] = process(values[name])
        return self.in_order(values)


@lru_cache(maxsize=256)
def prepare(statement: Any, columns: tuple[str, ...], dialect: Dialect, schemas: SchemaNames = ()) -> Prepared:
    """Compile a statement whose rows have these columns, with other schemas for those of its tables if it says so."""
    named = {"schema_translate_map": dict(schemas), "render_schema_translate": True} if schemas else {}
    compiled = statement.compile(dialect=dialect, column_keys=list(columns), **named)
    order = compiled.positiontup
    binds = {name: compiled.binds[name] for name in order}
    processors = [
        (name, process)
        for name, bind in binds.items()
        if (process := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    ]
    return Prepared(
        text=compiled.string,
        constants={name: bind.effective_value for name, bind in binds.items() if name not in columns},
        processors=processors,
        in_order=itemgetter(*order) if len(order) > 1 else lambda values: (values[order[0]],),
    )


@cache
def dialect_for(name: str, paramstyle: str) -> Dialect:
    """SQLAlchemy's words for a driver, without the driver."""
    dialect: Dialect = registry.load(name)(paramstyle=paramstyle)
    return dialect


# Batches: rows that go as one INSERT, for drivers that write parameters into the text. Their own batches take rows of
# bare parameters only, and send all others one by one.
MOST_ROWS, MOST_BYTES = 500, 256 * 1024  # of one statement: twice as many when escaped, and a server may take 1 MiB
_ROW = 1024  # bytes that a row may have beside its longest value, about
_VALUES = re.compile(r"(INSERT INTO .* VALUES )(\(.*\))", re.DOTALL)


def batches(text: str, rows: Sequence[Parameters]) -> Iterator[tuple[str, Parameters]]:
    """The statements that write these rows, each with its parameters; another statement than INSERT for each row."""
    several = _VALUES.fullmatch(text) if len(rows) > 1 else None
    if several is None:
        yield from ((text, row) for row in rows)
        return
    for part in _parts(rows):
        yield several[1] + ", ".join([several[2]] * len(part)), tuple(value for row in part for value in row)


def _parts(rows: Sequence[Parameters]) -> Iterator[Sequence[Parameters]]:
    part: list[Parameters] = []
    size = 0
    for row in rows:
        weight = _ROW + max((len(value) for value in row if isinstance(value, bytes)), default=0)
        if part and (len(part) == MOST_ROWS or size + weight > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += weight
    if part:
        yield part
