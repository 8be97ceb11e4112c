"""Arguments: what a listener's callback asks for, decided once from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.body import Decoder, decoder
from outbox.core.callables import is_async, is_kind, makes_context_manager, plain, with_session
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery

Value = TypeVar("Value")
Filler = Callable[[Value], Any]  # an argument, made from what the listener is called for

_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ListenerSignature(Generic[Value]):
    """What a callback's parameters ask for."""

    is_async: bool
    session: type[AsyncSession] | type[Session] | None  # the kind of session
    session_name: str
    fillers: tuple[tuple[str, Filler[Value]], ...]
    others: list[Parameter]  # one of them takes the body
    positional: tuple[Parameter, ...]  # have no name to be passed by

    @staticmethod
    def read(
        listener: Listener,
        named: Mapping[str, Filler[Value]],
        is_message: Callable[[Any], bool],  # says of an annotation whether `message` fills it
        message: Filler[Value],
    ) -> ListenerSignature[Value]:
        """Read it; what cannot work is refused before any message is touched."""
        session: type[AsyncSession] | type[Session] | None = None
        session_name = ""
        fillers: list[tuple[str, Filler[Value]]] = []
        others: list[Parameter] = []
        found = _parameters(listener)
        for parameter in found:
            kind = plain(parameter.annotation)
            if is_kind(kind, AsyncSession) or is_kind(kind, Session):
                if session is not None:
                    raise ConfigurationError(f"{listener.queue}: one session is enough, there is one transaction")
                session, session_name = (AsyncSession if is_kind(kind, AsyncSession) else Session), parameter.name
            elif is_message(kind):
                fillers.append((parameter.name, message))
            elif parameter.name in named:
                fillers.append((parameter.name, named[parameter.name]))
            else:
                others.append(parameter)
        _check_kind(listener, session)
        positional = tuple(parameter for parameter in found if parameter.kind is Parameter.POSITIONAL_ONLY)
        return ListenerSignature(is_async(listener.callback), session, session_name, tuple(fillers), others, positional)

    def required_others(self) -> list[Parameter]:
        """Those without a default."""
        return [parameter for parameter in self.others if parameter.default is Parameter.empty]

    def call(self, callback: Callable[..., Any], values: dict[str, Any], session: object = None) -> Any:
        """Call the callback with the values, and with the session it asked for."""
        if session is not None:
            values = values | {self.session_name: session}
        if not self.positional:
            return callback(**values)
        values = dict(values)
        first = [values.pop(parameter.name, parameter.default) for parameter in self.positional]
        return callback(*first, **values)


@dataclass(frozen=True)
class Arguments(ListenerSignature[Delivery]):
    """How to call one listener."""

    _body_name: str
    _decode: Decoder

    @classmethod
    def of(cls, listener: Listener, queue_name: str | None = None) -> Arguments:
        """Read the callback's signature; what cannot work is refused before any message is touched."""
        named = _by_name(queue_name or listener.queue)
        signature = ListenerSignature.read(listener, named, lambda kind: kind is Message, _message)
        body = _body(listener, signature)
        return cls(**vars(signature), _body_name=body.name, _decode=decoder_for(listener, body.annotation))

    def bind(self, delivery: Delivery) -> dict[str, Any]:
        """The values for one delivery, all but the session; raises Undecodable."""
        values = {self._body_name: self._decode(delivery.attempt.message.body)}
        for name, filler in self.fillers:
            values[name] = filler(delivery)
        return values


def decoder_for(listener: Listener, annotation: Any) -> Decoder:
    """What makes the value that a callback's annotation asks for."""
    try:
        return decoder(annotation)
    except ConfigurationError as error:
        raise ConfigurationError(f"{listener.queue}: {error}") from error


def _check_kind(listener: Listener, session: type[AsyncSession] | type[Session] | None) -> None:
    """Refuse a callback that cannot be called, or not with the session that it asks for."""
    if inspect.isgeneratorfunction(listener.callback) or inspect.isasyncgenfunction(listener.callback):
        raise ConfigurationError(f"{listener.queue}: calling a generator runs nothing; remove its yield")
    if makes_context_manager(listener.callback):
        raise ConfigurationError(f"{listener.queue}: calling a context manager runs nothing; remove its decorator")
    if session is AsyncSession and not is_async(listener.callback):
        raise ConfigurationError(f"{listener.queue}: a plain function cannot use an AsyncSession; make it `async def`")
    if session is Session and is_async(listener.callback):
        raise ConfigurationError(f"{listener.queue}: an async function would block on a Session; ask for AsyncSession")


def _by_name(queue: str) -> dict[str, Filler[Delivery]]:
    return {
        "routing_key": lambda delivery: delivery.attempt.message.routing_key,
        "message": lambda delivery: delivery.raw,
        "tracking_ids": lambda delivery: delivery.attempt.message.tracking_ids,
        "queue_name": lambda delivery: queue,
        "attempt_count": lambda delivery: delivery.attempt.attempt_count,
    }


def _message(delivery: Delivery) -> Message:
    return delivery.attempt.message


def _body(listener: Listener, signature: ListenerSignature[Delivery]) -> Parameter:
    candidates = signature.required_others() or signature.others
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(parameter.name for parameter in candidates) or "none"
    raise ConfigurationError(
        f"{listener.queue}: exactly one argument takes the body, besides routing_key, message, tracking_ids, "
        f"queue_name, attempt_count and those annotated AsyncSession, Session or Message; found: {names}"
    )


def _parameters(listener: Listener) -> list[Parameter]:
    """The arguments of a callback, without those that take any number."""
    try:
        found = inspect.signature(with_session(listener.callback), eval_str=True).parameters
        return [parameter for parameter in found.values() if parameter.kind in _NAMED]
    except NameError as error:
        raise ConfigurationError(
            f"{listener.queue}: an annotation cannot be resolved ({error}); define {error.name!r} in its module"
        ) from error
    except (AttributeError, SyntaxError, ArithmeticError, LookupError) as error:
        raise ConfigurationError(f"{listener.queue}: an annotation cannot be resolved ({error})") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{listener.queue}: the callback has no signature to read: {error}") from error
