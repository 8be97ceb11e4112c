"""Arguments: what a listener's callback asks for, decided once from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.body import Decoder, decoder
from outbox.core.callables import is_async
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery

Filler = Callable[[Delivery], Any]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Arguments:
    """How to call one listener."""

    is_async: bool
    session: type[AsyncSession] | type[Session] | None  # the kind of session it asks for
    _session_name: str
    _body_name: str
    _decode: Decoder
    _fillers: tuple[tuple[str, Filler], ...]
    _positional: tuple[Parameter, ...]

    @classmethod
    def of(cls, listener: Listener, queue_name: str | None = None) -> Arguments:
        """Read the callback's signature; what cannot work is refused before any message is touched."""
        session: type[AsyncSession] | type[Session] | None = None
        session_name = ""
        fillers: list[tuple[str, Filler]] = []
        others: list[Parameter] = []
        named = _by_name(queue_name or listener.queue)
        signature = _signature(listener)
        for parameter in signature.parameters.values():
            if parameter.kind not in _POSITIONAL:
                continue
            kind = _plain(parameter.annotation)
            if _is(kind, AsyncSession) or _is(kind, Session):
                if session is not None:
                    raise ConfigurationError(f"{listener.queue}: one session is enough, there is one transaction")
                session, session_name = (AsyncSession if _is(kind, AsyncSession) else Session), parameter.name
            elif kind is Message:
                fillers.append((parameter.name, _message))
            elif parameter.name in named:
                fillers.append((parameter.name, named[parameter.name]))
            else:
                others.append(parameter)
        body = _body(listener, others)
        if inspect.isgeneratorfunction(listener.callback) or inspect.isasyncgenfunction(listener.callback):
            raise ConfigurationError(f"{listener.queue}: calling a generator runs nothing; remove its yield")
        asynchronous = is_async(listener.callback)
        if session is AsyncSession and not asynchronous:
            raise ConfigurationError(
                f"{listener.queue}: a plain function cannot use an AsyncSession; make it `async def`"
            )
        if session is Session and asynchronous:
            raise ConfigurationError(
                f"{listener.queue}: an async function would block on a Session; ask for AsyncSession"
            )
        positional = tuple(p for p in signature.parameters.values() if p.kind is Parameter.POSITIONAL_ONLY)
        try:
            decode = decoder(body.annotation)
        except ConfigurationError as error:
            raise ConfigurationError(f"{listener.queue}: {error}") from error
        return cls(asynchronous, session, session_name, body.name, decode, tuple(fillers), positional)

    def bind(self, delivery: Delivery) -> dict[str, Any]:
        """The values for one delivery, all but the session; raises Undecodable."""
        values = {self._body_name: self._decode(delivery.attempt.message.body)}
        for name, filler in self._fillers:
            values[name] = filler(delivery)
        return values

    def call(self, callback: Callable[..., Any], values: dict[str, Any], session: object = None) -> Any:
        """Call the callback with the values, and with the session it asked for."""
        if session is not None:
            values = values | {self._session_name: session}
        if self._positional:
            values = dict(values)
            first = [values.pop(parameter.name, parameter.default) for parameter in self._positional]
            return callback(*first, **values)
        return callback(**values)


def _by_name(queue: str) -> dict[str, Filler]:
    return {
        "routing_key": lambda delivery: delivery.attempt.message.routing_key,
        "message": lambda delivery: delivery.raw,
        "tracking_ids": lambda delivery: delivery.attempt.message.tracking_ids,
        "queue_name": lambda delivery: queue,
        "attempt_count": lambda delivery: delivery.attempt.attempt_count,
    }


def _message(delivery: Delivery) -> Message:
    return delivery.attempt.message


def _body(listener: Listener, others: list[Parameter]) -> Parameter:
    required = [parameter for parameter in others if parameter.default is Parameter.empty]
    candidates = required or others
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(parameter.name for parameter in candidates) or "none"
    raise ConfigurationError(
        f"{listener.queue}: exactly one argument takes the body, besides routing_key, message, tracking_ids, "
        f"queue_name, attempt_count and those annotated AsyncSession, Session or Message; found: {names}"
    )


def _signature(listener: Listener) -> inspect.Signature:
    try:
        return inspect.signature(listener.callback, eval_str=True)
    except NameError as error:
        raise ConfigurationError(
            f"{listener.queue}: an annotation cannot be resolved ({error}); define {error.name!r} in its module"
        ) from error
    except (AttributeError, SyntaxError, ArithmeticError, LookupError) as error:
        raise ConfigurationError(f"{listener.queue}: an annotation cannot be resolved ({error})") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{listener.queue}: the callback has no signature to read: {error}") from error


def _plain(annotation: Any) -> Any:
    """An annotation without its Annotated and its `| None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [each for each in get_args(annotation) if each is not NoneType]
        return _plain(others[0]) if len(others) == 1 else annotation
    return annotation


def _is(annotation: object, kind: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kind)
