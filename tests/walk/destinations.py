"""Destinations: transports that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from outbox import Message, TransportUnavailable
from outbox.core.transport import Features, Published, Refusal, Report, Transport, unreported
from tests.support.observing import PATIENCE

Answer = Callable[[Sequence[Message]], Any]  # Published, or what gives it when it is awaited


class Scripted(Transport):
    """A transport that answers as the test says: one answer for each call, the last one for ever."""

    name = "scripted"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.calls: list[list[Message]] = []
        self.called = asyncio.Condition()

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        async with self.called:
            self.calls.append(list(messages))
            self.called.notify_all()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        result = answer(messages)
        return await result if asyncio.iscoroutine(result) else result

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(PATIENCE), self.called:
            await self.called.wait_for(lambda: len(self.calls) >= calls)


class Sink(Transport):
    """A destination that answers as it is told at the moment."""

    name = "sink"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False, shares_outages=True)

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[list[Message]] = []

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        self.calls.append(list(messages))
        answer = self.answer(messages)
        result: Published = await answer if asyncio.iscoroutine(answer) else answer
        return result


def yes(messages: Sequence[Message]) -> Published:
    return Published(frozenset(message.id for message in messages))


def no(messages: Sequence[Message]) -> Published:
    return Published(frozenset(), {message.id: Refusal("not now") for message in messages})


def nothing(messages: Sequence[Message]) -> Published:
    return Published()


def unavailable(messages: Sequence[Message]) -> Published:
    raise TransportUnavailable("connection refused")


def broken(messages: Sequence[Message]) -> Published:
    raise RuntimeError("a bug in the client library")


async def cancelled(messages: Sequence[Message]) -> Published:
    raise asyncio.CancelledError
