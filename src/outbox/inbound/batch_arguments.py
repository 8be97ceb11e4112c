"""BatchArguments: what a callback asks for that takes lists."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_args, get_origin

from outbox.core.body import Decoder
from outbox.core.callables import plain
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Delivery
from outbox.inbound.arguments import ListenerSignature, decoder_for
from outbox.inbound.batches import Part, Together

_OF_ONE_MESSAGE = ("routing_key", "message", "tracking_ids")


@dataclass(frozen=True)
class BatchArguments(ListenerSignature[Together]):
    """How to call a listener with a list."""

    _body_name: str | None
    _decode: Decoder

    @classmethod
    def of(cls, listener: Listener, queue_name: str | None = None) -> BatchArguments:
        """Read the callback's signature; what cannot work is refused before any message is touched."""
        named = {"queue_name": lambda _: queue_name or listener.queue, "attempt_count": _attempt_count}
        signature = ListenerSignature.read(listener, named, lambda kind: _item(kind) is Message, _messages)
        body = _body(listener, signature)
        if body is None:
            return cls(**vars(signature), _body_name=None, _decode=_unread)
        decode = decoder_for(listener, _item_of(listener, body))
        return cls(**vars(signature), _body_name=body.name, _decode=decode)

    def part(self, delivery: Delivery) -> Part:
        """A delivery with its body; raises Undecodable."""
        return Part(delivery, self._decode)

    def bind(self, delivery: Delivery) -> Any:
        """The values are made when the listener is called: until then some may turn out to be handled."""
        return delivery

    def call(self, callback: Callable[..., Any], values: Any, session: object = None) -> Any:
        """Call the callback, and take what it reports."""
        together: Together = values
        arguments = {name: filler(together) for name, filler in self.fillers}
        if self._body_name is not None:
            arguments[self._body_name] = [part.body() for part in together.parts]
        returned = super().call(callback, arguments, session)
        if self.is_async:
            return _reported(together, returned)
        if not inspect.isawaitable(returned):  # the caller refuses one
            together.report(returned)
        return returned


async def _reported(together: Together, returned: Awaitable[object]) -> None:
    together.report(await returned)


def _messages(together: Together) -> list[Message]:
    return [part.delivery.attempt.message for part in together.parts]


def _attempt_count(together: Together) -> int:
    """The same for all: only what is tried for the first time comes with others."""
    return together.attempt.attempt_count


def _unread(body: bytes) -> None:
    return None


def _body(listener: Listener, signature: ListenerSignature[Together]) -> Parameter | None:
    asks_for_messages = any(filler is _messages for _, filler in signature.fillers)
    candidates = signature.required_others() or ([] if asks_for_messages else signature.others)
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


def _item_of(listener: Listener, body: Parameter) -> Any:
    item = _item(plain(body.annotation))
    if item is None:
        raise ConfigurationError(
            f"{listener.queue}: batch={listener.batch} gives a list, and {body.name} is no list: annotate it as "
            f"`{body.name}: list[…]`, or remove batch="
        )
    return item


def _item(annotation: Any) -> Any:
    """What a list is annotated to hold; None if it is no list."""
    if annotation in (Parameter.empty, Any, list, Sequence):
        return Any
    if get_origin(annotation) in (list, Sequence):
        return get_args(annotation)[0]
    return None
