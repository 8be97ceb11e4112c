"""FunctionTransport: an application's own `async def publish(message)` as the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from outbox.core.errors import described
from outbox.core.loops import cancelled_from_outside
from outbox.core.message import Message
from outbox.core.transport import Features, Published, Refusal, Report, Transport, unreported

CALLED_WITHIN = 20.0  # seconds for one message; less than the relay gives to the whole batch


class FunctionTransport(Transport):
    """Returning means sent, raising means not sent."""

    name = "function"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False, reports_answers=True)

    def __init__(self, publish: Callable[[Message], Awaitable[object]]) -> None:
        self._publish = publish
        self._answered_at = float("-inf")  # when it last returned or raised, by the loop's clock
        name: str = getattr(publish, "__name__", "")
        self.route = name if name.isidentifier() else None
        named = publish if hasattr(publish, "__qualname__") else type(publish)
        self.address = f"{named.__module__}.{named.__qualname__}"  # two functions of one name are two

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        silences: list[tuple[str, float, str]] = []  # a message without an answer, when it was asked about, and why
        answers = await asyncio.gather(*(self._one(message, report, silences) for message in messages))
        confirmed = frozenset[str]().union(*(answer.confirmed for answer in answers))
        refused = {id: why for answer in answers for id, why in answer.refused.items()}
        # Only now: it may have given up on one before it was done with another one of the same time.
        for id, began, why in silences:
            if self._answered_at > began:
                refused[id] = Refusal(f"{why}, while others were answered")
        return Published(confirmed, refused)

    async def _one(self, message: Message, report: Report, silences: list[tuple[str, float, str]]) -> Published:
        now = asyncio.get_running_loop().time
        began = now()
        try:
            async with asyncio.timeout(CALLED_WITHIN):
                await self._publish(message)
        except TimeoutError as error:
            silences.append((message.id, began, str(error) or f"no answer within {CALLED_WITHIN:g} s"))
            return Published()  # in doubt, if all others are: the destination may be away
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            # A client library that dies cancels what it was doing: in doubt, which means published again.
            silences.append((message.id, began, "the function was cancelled"))
            return Published()
        except Exception as error:  # noqa: BLE001 - whatever it raises means: not sent
            answer = Published(refused={message.id: Refusal(described(error))})
        else:
            answer = Published(frozenset([message.id]))
        self._answered_at = now()
        report(answer)
        return answer
