"""Texts: columns of text that PostgreSQL compares by its own operators, whatever other roles have created.

For `=` with a VARCHAR on one side PostgreSQL has no operator of its own that fits exactly. It takes that of TEXT, if
no schema in the search_path has one for VARCHAR, which would run as the role whose statement it is. Of two TEXT there
is one in `pg_catalog`, which comes first. Indexes serve it as before: VARCHAR is compared as TEXT anyway.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BindParameter, Cast, ColumnElement, String, Text, literal, type_coerce
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.operators import OperatorType, is_, is_not
from sqlalchemy.types import NullType, TypeEngine


class AsText(Cast[str]):
    """A text, of PostgreSQL's type TEXT. Other databases have one type of text."""

    inherit_cache = True

    def __init__(self, text: ColumnElement[Any]) -> None:
        super().__init__(text, Text())


@compiles(AsText)
def _plain(element: AsText, compiler: Any, **options: Any) -> str:
    text: str = compiler.process(element.clause, **options)
    return text


@compiles(AsText, "postgresql")
def _cast(element: AsText, compiler: Any, **options: Any) -> str:
    text: str = compiler.visit_cast(element, **options)
    return text


def as_text(value: Any) -> Any:
    """One side of a comparison. A subquery is left as it is: its columns have their own types."""
    match value:
        case str():
            return AsText(literal(value, Text()))
        case BindParameter(type=NullType()):
            return AsText(type_coerce(value, Text()))
        case ColumnElement(type=String()) if not isinstance(value, AsText):
            return AsText(value)
        case _:
            return value


class _Comparator(String.Comparator[str]):
    def operate(self, op: OperatorType, *other: Any, **options: Any) -> ColumnElement[Any]:
        if op in (is_, is_not):
            return super().operate(op, *other, **options)
        return as_text(self.expr).comparator.operate(op, *map(as_text, other), **options)  # type: ignore[no-any-return]


def compared_as_text(type: String) -> TypeEngine[str]:
    """A type for columns. It stays SQLAlchemy's own, by whose name Alembic writes it into migrations."""
    type.comparator_factory = _Comparator
    return type
