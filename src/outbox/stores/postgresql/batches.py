"""PostgreSQL's batches: as many of the messages that a statement found as it may fetch, by their bytes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ARRAY, CTE, BigInteger, ColumnElement, Select, bindparam, case, func, select


def fitting(found: CTE, chosen: Select[Any]) -> ColumnElement[Any]:
    """The ids of what was chosen of `due`, up to so many bytes of bodies as `most` says; the first one always.

    Where everything found fits, which is nearly always, that is all there is to add up.
    """
    most = bindparam("most", type_=BigInteger)
    (id,) = chosen.selected_columns
    running = func.sum(found.c.size).over(order_by=(found.c.due_at, found.c.id), rows=(None, 0)).label("running")
    summed = select(found.c.id, found.c.size, running).subquery("summed")
    fits = select(summed.c.id).where((summed.c.running <= most) | (summed.c.running == summed.c.size))
    everything = select(func.coalesce(func.sum(found.c.size), 0)).scalar_subquery()
    return case((everything <= most, _array(chosen)), else_=_array(chosen.where(id.in_(fits))))


def count(found: CTE) -> ColumnElement[int]:
    """How many were found."""
    return select(func.count()).select_from(found).scalar_subquery()


def _array(ids: Select[Any]) -> ColumnElement[Any]:
    return func.array(ids.scalar_subquery(), type_=ARRAY(BigInteger))
