"""BatchArguments: what a callback asks for that takes lists."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_args, get_origin

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.core.body import Decoder, decoder
from outbox.core.callables import is_async, is_kind, plain
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery
from outbox.inbound.arguments import called, check_kind, parameters
from outbox.inbound.batches import Part, Together

Filler = Callable[[Together], Any]

_OF_ONE_MESSAGE = ("routing_key", "message", "tracking_ids")


@dataclass(frozen=True)
class BatchArguments:
    """How to call a listener with a list."""

    is_async: bool
    session: type[AsyncSession] | type[Session] | None  # the kind of session it asks for
    _session_name: str
    _decode: Decoder
    _fillers: tuple[tuple[str, Filler], ...]
    _positional: tuple[Parameter, ...]

    @classmethod
    def of(cls, listener: Listener, queue_name: str | None = None) -> BatchArguments:
        """Read the callback's signature; what cannot work is refused before any message is touched."""
        session: type[AsyncSession] | type[Session] | None = None
        session_name = ""
        fillers: list[tuple[str, Filler]] = []
        others: list[Parameter] = []
        found = parameters(listener)
        for parameter in found:
            kind = plain(parameter.annotation)
            if is_kind(kind, AsyncSession) or is_kind(kind, Session):
                if session is not None:
                    raise ConfigurationError(f"{listener.queue}: one session is enough, there is one transaction")
                session, session_name = (AsyncSession if is_kind(kind, AsyncSession) else Session), parameter.name
            elif _item(kind) is Message:
                fillers.append((parameter.name, _messages))
            elif parameter.name == "queue_name":
                fillers.append((parameter.name, lambda _: queue_name or listener.queue))
            elif parameter.name == "attempt_count":
                fillers.append((parameter.name, _attempt_count))
            else:
                others.append(parameter)
        decode: Decoder = _unread
        body = _body(listener, others, asks_for_messages=any(filler is _messages for _, filler in fillers))
        if body is not None:
            fillers.append((body.name, _bodies))
            decode = _decoder(listener, body)
        check_kind(listener, session)
        positional = tuple(parameter for parameter in found if parameter.kind is Parameter.POSITIONAL_ONLY)
        return cls(is_async(listener.callback), session, session_name, decode, tuple(fillers), positional)

    def part(self, delivery: Delivery) -> Part:
        """A delivery with its body; raises Undecodable."""
        return Part(delivery, self._decode)

    def bind(self, delivery: Delivery) -> Any:
        """The values are made when the listener is called: until then some may turn out to be handled."""
        return delivery

    def call(self, callback: Callable[..., Any], values: Any, session: object = None) -> Any:
        """Call the callback, and take what it reports."""
        together: Together = values
        arguments = {name: filler(together) for name, filler in self._fillers}
        if session is not None:
            arguments[self._session_name] = session
        returned = called(callback, arguments, self._positional)
        if self.is_async:
            return _reported(together, returned)
        if not inspect.isawaitable(returned):  # the caller refuses one
            together.report(returned)
        return returned


async def _reported(together: Together, returned: Awaitable[object]) -> None:
    together.report(await returned)


def _bodies(together: Together) -> list[Any]:
    return [part.body() for part in together.parts]


def _messages(together: Together) -> list[Message]:
    return [part.delivery.attempt.message for part in together.parts]


def _attempt_count(together: Together) -> int:
    """The same for all: only what is tried for the first time comes with others."""
    return together.attempt.attempt_count


def _unread(body: bytes) -> None:
    return None


def _body(listener: Listener, others: list[Parameter], *, asks_for_messages: bool) -> Parameter | None:
    required = [parameter for parameter in others if parameter.default is Parameter.empty]
    candidates = required or ([] if asks_for_messages else others)
    for parameter in candidates:
        if parameter.name in _OF_ONE_MESSAGE:
            raise ConfigurationError(
                f"{listener.queue}: {parameter.name} is one message's, and batch={listener.batch} gives a list of "
                "them: ask for `messages: list[Message]`"
            )
    if len(candidates) == 1 or (asks_for_messages and not candidates):
        return candidates[0] if candidates else None
    names = ", ".join(parameter.name for parameter in candidates) or "none"
    raise ConfigurationError(
        f"{listener.queue}: exactly one argument takes the list of bodies, besides queue_name, attempt_count and those "
        f"annotated AsyncSession, Session or list[Message]; found: {names}"
    )


def _decoder(listener: Listener, body: Parameter) -> Decoder:
    item = _item(plain(body.annotation))
    if item is None:
        raise ConfigurationError(
            f"{listener.queue}: batch={listener.batch} gives a list, and {body.name} is no list: annotate it as "
            f"`{body.name}: list[…]`, or remove batch="
        )
    try:
        return decoder(item)
    except ConfigurationError as error:
        raise ConfigurationError(f"{listener.queue}: {error}") from error


def _item(annotation: Any) -> Any:
    """What a list is annotated to hold; None if it is no list."""
    if annotation in (Parameter.empty, Any, list, Sequence):
        return Any
    if get_origin(annotation) in (list, Sequence):
        return get_args(annotation)[0]
    return None
