"""Callables: what kind of function the user gave us, and what it asks for."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from types import MethodType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

_HIDDEN = "__outbox_session__"


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def _asynchronous() -> AsyncIterator[None]:
    yield


_CONTEXT_MANAGERS = (type(_plain()), type(_asynchronous()))  # contextlib gives these classes no public names


def is_async(function: Callable[..., Any]) -> bool:
    """Whether its answer has to be awaited."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def makes_context_manager(function: Callable[..., Any]) -> bool:
    """Whether it is decorated with contextlib's contextmanager or asynccontextmanager: calling it runs nothing.

    Not by a decorator below another one, which may enter it: there it is found when it is returned.
    """
    while isinstance(function, functools.partial):
        function = function.func
    behind = inspect.unwrap(function)
    is_generator = inspect.isgeneratorfunction(behind) or inspect.isasyncgenfunction(behind)
    return is_generator and getattr(function, "__globals__", None) is vars(contextlib)


def not_run(returned: object) -> str | None:
    """An awaitable, generator or contextlib's context manager that a function returned and its caller has to run.

    None if it was run.
    """
    if inspect.isawaitable(returned):
        return "an awaitable"
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return "a generator"
    if isinstance(returned, _CONTEXT_MANAGERS):
        return "a context manager"
    return None


def plain(annotation: Any) -> Any:
    """An annotation without its Annotated and its `| None`."""
    if get_origin(annotation) is Annotated:
        return plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [each for each in get_args(annotation) if each is not NoneType]
        return plain(others[0]) if len(others) == 1 else annotation
    return annotation


def is_kind(annotation: object, kind: type) -> bool:
    """Whether an annotation is this class or one made from it."""
    return isinstance(annotation, type) and issubclass(annotation, kind)


def hide_session(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Show a function without the session that it can be called with, or do without."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    setattr(function, _HIDDEN, True)


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose signature tells of the session, where that was hidden."""
    if isinstance(function, functools.partial):
        return functools.partial(with_session(function.func), *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return MethodType(with_session(function.__func__), function.__self__)
    behind: Callable[..., Any] = inspect.unwrap(function, stop=lambda each: not hasattr(each, _HIDDEN))
    return behind
