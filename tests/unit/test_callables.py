"""Callables: whatever can be called can listen, and annotations may be postponed."""

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox import Listener
from outbox.inbound.arguments import Arguments
from tests.unit.listening import SESSION, Order, call, refused


class Handler:
    def __init__(self, name: str = "handler") -> None:
        self.name = name

    async def __call__(self, order: Order, attempt_count: int) -> object:
        return self.name, order, attempt_count

    async def method(self, order: Order, queue_name: str) -> object:
        return self.name, order, queue_name

    def plain_method(self, order: Order) -> object:
        return self.name, order

    @classmethod
    async def of_class(cls, order: Order) -> object:
        return cls, order

    @staticmethod
    def static(order: Order) -> object:
        return order


async def with_a_prefix(prefix: str, order: Order, routing_key: str) -> object:
    return prefix, order, routing_key


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*arguments: Any, **options: Any) -> Any:
        return await function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize(
    ("callback", "is_async", "expected"),
    [
        pytest.param(Handler(), True, ("handler", Order(id=1), 1), id="a callable object"),
        pytest.param(Handler().method, True, ("handler", Order(id=1), "orders"), id="a bound method"),
        pytest.param(Handler().plain_method, False, ("handler", Order(id=1)), id="a plain bound method"),
        pytest.param(Handler.of_class, True, (Handler, Order(id=1)), id="a class method"),
        pytest.param(Handler.static, False, Order(id=1), id="a static method"),
        pytest.param(lambda order: order, False, {"id": 1}, id="a lambda"),
        pytest.param(Order.model_validate, False, Order(id=1), id="a model's class method"),
        pytest.param(
            functools.partial(with_a_prefix, "a"), True, ("a", Order(id=1), "order.created"), id="a partial by position"
        ),
        pytest.param(
            functools.partial(with_a_prefix, prefix="b"), True, ("b", Order(id=1), "order.created"), id="by name"
        ),
        pytest.param(functools.partial(Handler("c")), True, ("c", Order(id=1), 1), id="a partial of an object"),
        pytest.param(
            functools.partial(functools.partial(with_a_prefix), "d"),
            True,
            ("d", Order(id=1), "order.created"),
            id="a partial of a partial",
        ),
        pytest.param(
            wrapping(functools.partial(with_a_prefix, "e")), True, ("e", Order(id=1), "order.created"), id="a decorator"
        ),
    ],
)
async def test_whatever_can_be_called_can_listen(callback: Any, is_async: bool, expected: object) -> None:
    assert Arguments.of(Listener("#", callback, queue="orders")).is_async is is_async
    assert await call(callback) == expected


def a_generator(order: object) -> Iterator[None]:
    yield


async def an_async_generator(order: object) -> Any:
    yield


@pytest.mark.parametrize(
    "callback",
    [
        a_generator,
        an_async_generator,
        contextlib.contextmanager(a_generator),
        contextlib.asynccontextmanager(an_async_generator),
        functools.partial(contextlib.asynccontextmanager(an_async_generator)),
    ],
)
def test_a_function_whose_call_runs_nothing_is_refused(callback: Any) -> None:
    refused(callback)


# Postponed annotations.


def module(folder: Path, source: str) -> dict[str, Any]:
    """A module whose annotations are all postponed."""
    path = folder / "listeners.py"
    path.write_text("from __future__ import annotations\n" + textwrap.dedent(source))
    namespace: dict[str, Any] = {"__name__": "listeners"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)  # noqa: S102 - the source is the test's own
    return namespace


async def test_postponed_annotations_are_resolved(tmp_path: Path) -> None:
    listeners = module(
        tmp_path,
        """
        from outbox import Message
        from pydantic import BaseModel
        from sqlalchemy.ext.asyncio import AsyncSession
        import sqlalchemy.orm as orm

        class Order(BaseModel):
            id: int

        async def typed(order: Order, envelope: Message, database: AsyncSession):
            return type(order).__name__, envelope.routing_key, database

        def by_attribute(order: dict[str, int], database: orm.Session):
            return order, database
        """,
    )
    assert await call(listeners["typed"]) == ("Order", "order.created", SESSION)
    assert await call(listeners["by_attribute"]) == ({"id": 1}, SESSION)


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        pytest.param("Nowhere", "Nowhere", id="an undefined name"),
        pytest.param("list[Nowhere]", "Nowhere", id="an undefined name within"),
        pytest.param("functools.Nowhere", "Nowhere", id="an undefined attribute"),
        pytest.param("'Nowhere'", "Nowhere", id="an undefined name in quotes"),
        pytest.param("1 +", "", id="no expression"),
        pytest.param("1 / 0", "", id="an expression that raises"),
    ],
)
def test_an_annotation_that_cannot_be_resolved_is_refused_by_name(annotation: str, named: str) -> None:
    async def listener(order): ...  # type: ignore[no-untyped-def]

    listener.__annotations__["order"] = annotation
    assert named in refused(listener)


def test_a_class_that_only_a_function_knows_is_refused_with_advice(tmp_path: Path) -> None:
    listeners = module(
        tmp_path,
        """
        def make():
            class Order: ...
            async def listener(order: Order): ...
            return listener
        """,
    )
    assert "'Order'" in refused(listeners["make"]())
