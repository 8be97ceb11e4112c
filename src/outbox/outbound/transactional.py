"""Transactional: a function that gets its session by annotation, and a transaction around it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox.core.callables import hide_session, is_async, is_kind, plain
from outbox.core.errors import ConfigurationError, TransactionError

Result = TypeVar("Result")
AnySessionType = TypeVar("AnySessionType", AsyncSession, Session)

_open: WeakKeyDictionary[asyncio.Task[Any] | threading.Thread, list[tuple[object, AsyncSession | Session]]]
_open = WeakKeyDictionary()  # by whom, with its owner; the innermost last


@contextmanager
def opened(owner: object, session: AsyncSession | Session) -> Iterator[None]:
    """While this lasts, the transactional functions that this task or thread calls find the session."""
    # Not a context variable: a task that is started meanwhile would inherit it, and a session is for one task.
    sessions = _open.setdefault(_who(), [])
    sessions.append((owner, session))
    try:
        yield
    finally:
        sessions.remove((owner, session))


def transactional(
    function: Callable[..., Result],
    owner: object,
    begin: Callable[[], AbstractAsyncContextManager[AsyncSession]],
    begin_sync: Callable[[], AbstractContextManager[Session]],
) -> Callable[..., Result]:
    """The function in a transaction of its own, in a savepoint of the one around it, or in the session it is given."""
    parameter = SessionParameter.of(function)
    if parameter.kind is AsyncSession:
        wrapper = _awaiting(function, parameter, owner, begin)
    else:
        wrapper = _blocking(function, parameter, owner, begin_sync)
    hide_session(wrapper, parameter.signature_without_it)
    return wrapper


def _awaiting(
    function: Callable[..., Any],
    parameter: SessionParameter,
    owner: object,
    begin: Callable[[], AbstractAsyncContextManager[AsyncSession]],
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if parameter.is_taken(args, kwargs):
            return await function(*args, **kwargs)
        around = _around(owner, AsyncSession)
        if around is None:
            async with begin() as session:
                return await parameter.call(function, args, kwargs, session)
        async with around.begin_nested():
            return await parameter.call(function, args, kwargs, around)

    return run


def _blocking(
    function: Callable[..., Any],
    parameter: SessionParameter,
    owner: object,
    begin: Callable[[], AbstractContextManager[Session]],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if parameter.is_taken(args, kwargs):
            return function(*args, **kwargs)
        if _around(owner, AsyncSession) is not None:
            raise TransactionError(
                f"{_name(function)} is a plain function, and cannot share the transaction that this task has "
                "open: make it `async def`, or call it outside of that"
            )
        around = _around(owner, Session)
        if around is None:
            with begin() as session:
                return parameter.call(function, args, kwargs, session)
        with around.begin_nested():
            return parameter.call(function, args, kwargs, around)

    return run


@dataclass(frozen=True, slots=True)
class SessionParameter:
    """The parameter by which a function takes its session."""

    kind: type[AsyncSession] | type[Session]
    name: str
    position: int | None  # none if it is passed by name only
    signature_without_it: inspect.Signature

    @classmethod
    def of(cls, function: Callable[..., Any]) -> SessionParameter:
        """Find the parameter that is annotated with a session; what cannot work is refused."""
        name = _name(function)
        if isinstance(function, classmethod | staticmethod):
            raise ConfigurationError(f"{name}: write @{type(function).__name__} above @transactional, not below it")
        behind = inspect.unwrap(function)  # such as @contextmanager
        if inspect.isgeneratorfunction(behind) or inspect.isasyncgenfunction(behind):
            raise ConfigurationError(f"{name}: a generator outlives its transaction; use `async with transaction()`")
        signature = _resolved(function)
        parameters = list(signature.parameters.values())
        kinds = [_session_kind(parameter.annotation) for parameter in parameters]
        found = [(position, kind) for position, kind in enumerate(kinds) if kind is not None]
        if len(found) != 1:
            raise ConfigurationError(
                f"{name}: @transactional needs exactly one argument that is annotated AsyncSession or Session, found "
                f"{len(found)}; the class must be imported when the module runs, not under TYPE_CHECKING alone"
            )
        position, kind = found[0]
        parameter = parameters.pop(position)
        if kind is AsyncSession and not is_async(function):
            raise ConfigurationError(f"{name}: a plain function cannot use an AsyncSession; make it `async def`")
        if kind is Session and is_async(function):
            raise ConfigurationError(f"{name}: an async function would block on a Session; ask for AsyncSession")
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ConfigurationError(
                f"{name}: the session needs a name to be passed by; remove the `/` behind it, or *"
            )
        by_name = parameter.kind is Parameter.KEYWORD_ONLY
        return cls(kind, parameter.name, None if by_name else position, signature.replace(parameters=parameters))

    def is_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the caller passes a session."""
        if self.name in kwargs:
            return kwargs[self.name] is not None
        if self.position is None or len(args) <= self.position:
            return False
        return isinstance(args[self.position], _SESSIONS)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        session: AsyncSession | Session,
    ) -> Any:
        """Call the function with a session as this parameter."""
        if self.position is None or len(args) <= self.position:
            return function(*args, **{**kwargs, self.name: session})
        others = {name: value for name, value in kwargs.items() if name != self.name}
        return function(*args[: self.position], session, *args[self.position :], **others)


_SESSIONS = (AsyncSession, Session, async_scoped_session, scoped_session)


def _resolved(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature, with annotations that are strings replaced by what they mean, if that is known yet."""
    with suppress(Exception):  # one of them may be defined further down, and then it is no session
        return inspect.signature(function, eval_str=True)
    names = getattr(inspect.unwrap(function), "__globals__", {})

    def meaning(annotation: Any) -> Any:
        with suppress(Exception):
            return eval(annotation, names)  # noqa: S307 - it is the code of the function's author
        return annotation

    signature = inspect.signature(function)
    parameters = [each.replace(annotation=meaning(each.annotation)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=meaning(signature.return_annotation))


def _session_kind(annotation: Any) -> type[AsyncSession] | type[Session] | None:
    for kind in (AsyncSession, Session):
        if is_kind(plain(annotation), kind):
            return kind
    return None


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _around(owner: object, kind: type[AnySessionType]) -> AnySessionType | None:
    """The session that this task or thread has open with the same owner."""
    for other, session in reversed(_open.get(_who(), ())):
        if other is owner and isinstance(session, kind):
            return session
    return None


def _who() -> asyncio.Task[Any] | threading.Thread:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return task or threading.current_thread()
