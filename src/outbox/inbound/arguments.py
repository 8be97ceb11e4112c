"""Arguments: what a listener's callback asks for, decided once from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.body import Decoder, decoder
from outbox.core.callables import is_async, is_kind, makes_context_manager, plain, with_session
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
        found = parameters(listener)
        for parameter in found:
            kind = plain(parameter.annotation)
            if is_kind(kind, AsyncSession) or is_kind(kind, Session):
                if session is not None:
                    raise ConfigurationError(f"{listener.queue}: one session is enough, there is one transaction")
                session, session_name = (AsyncSession if is_kind(kind, AsyncSession) else Session), parameter.name
            elif kind is Message:
                fillers.append((parameter.name, _message))
            elif parameter.name in named:
                fillers.append((parameter.name, named[parameter.name]))
            else:
                others.append(parameter)
        body = _body(listener, others)
        check_kind(listener, session)
        positional = tuple(parameter for parameter in found if parameter.kind is Parameter.POSITIONAL_ONLY)
        try:
            decode = decoder(body.annotation)
        except ConfigurationError as error:
            raise ConfigurationError(f"{listener.queue}: {error}") from error
        return cls(is_async(listener.callback), session, session_name, body.name, decode, tuple(fillers), positional)

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
        return called(callback, values, self._positional) if self._positional else callback(**values)


def called(callback: Callable[..., Any], values: dict[str, Any], positional: tuple[Parameter, ...]) -> Any:
    """Call a callback some of whose arguments have no name to call them by."""
    values = dict(values)
    first = [values.pop(parameter.name, parameter.default) for parameter in positional]
    return callback(*first, **values)


def check_kind(listener: Listener, session: type[AsyncSession] | type[Session] | None) -> None:
    """Refuse a callback that cannot be called, or not with the session that it asks for."""
    if inspect.isgeneratorfunction(listener.callback) or inspect.isasyncgenfunction(listener.callback):
        raise ConfigurationError(f"{listener.queue}: calling a generator runs nothing; remove its yield")
    if makes_context_manager(listener.callback):
        raise ConfigurationError(f"{listener.queue}: calling a context manager runs nothing; remove its decorator")
    if session is AsyncSession and not is_async(listener.callback):
        raise ConfigurationError(f"{listener.queue}: a plain function cannot use an AsyncSession; make it `async def`")
    if session is Session and is_async(listener.callback):
        raise ConfigurationError(f"{listener.queue}: an async function would block on a Session; ask for AsyncSession")


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


def parameters(listener: Listener) -> list[Parameter]:
    """The arguments of a callback, without those that take any number."""
    try:
        found = inspect.signature(with_session(listener.callback), eval_str=True).parameters
        return [parameter for parameter in found.values() if parameter.kind in _POSITIONAL]
    except NameError as error:
        raise ConfigurationError(
            f"{listener.queue}: an annotation cannot be resolved ({error}); define {error.name!r} in its module"
        ) from error
    except (AttributeError, SyntaxError, ArithmeticError, LookupError) as error:
        raise ConfigurationError(f"{listener.queue}: an annotation cannot be resolved ({error})") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{listener.queue}: the callback has no signature to read: {error}") from error
