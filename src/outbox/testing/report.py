"""Report: what happened while an outbox was drained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.dead_letter import DeadLetter
from outbox.core.durations import NO_DELAY
from outbox.core.errors import OutboxError
from outbox.core.events import Event, Handled, Relayed, Troubled


@dataclass(frozen=True, kw_only=True)
class Drained:
    """What happened. The counts are compared, the rest is there to be looked at."""

    handled: int = 0  # attempts of listeners that succeeded
    retried: int = 0  # attempts of listeners that failed and were followed by another
    dead: int = 0  # messages that became dead letters
    unroutable: int = 0  # messages that wait because no queue is bound to their routing key
    sent: int = 0  # messages that a transport took which only publishes
    left: int = 0  # messages in queues of other listeners, in other hands, or due later than the clock may be moved
    passed: timedelta = field(default=NO_DELAY, compare=False)  # by how much the clock was moved
    errors: tuple[BaseException, ...] = field(default=(), compare=False)  # what listeners raised, in this order
    attempts: tuple[Handled, ...] = field(default=(), compare=False, repr=False)  # each with its queue and outcome
    dead_letters: tuple[DeadLetter, ...] = field(default=(), compare=False, repr=False)


class NotDrained(OutboxError):
    """There was no end to it; `drained` tells what happened until then."""

    def __init__(self, text: str, drained: Drained) -> None:
        super().__init__(text)
        self.drained = drained


class Tally:
    """An observer that counts."""

    def __init__(self) -> None:
        self.attempts: list[Handled] = []
        self.sent = 0
        self.refusals = 0
        self.refused: set[str] = set()  # ids of messages that the transport would not take when it was last asked
        self.trouble: BaseException | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Handled():
                self.attempts.append(event)
            case Relayed(attempt, outcome):
                self.sent += isinstance(outcome, Done)
                self.refused.discard(attempt.message.id)
                if isinstance(outcome, RetryIn):
                    self.refusals += 1
                    self.refused.add(attempt.message.id)
            case Troubled(error=error):
                self.trouble = error
            case _:
                pass

    @property
    def handled(self) -> int:
        return sum(isinstance(each.outcome, Done) for each in self.attempts)

    @property
    def retried(self) -> int:
        return sum(isinstance(each.outcome, RetryIn) for each in self.attempts)

    @property
    def dead(self) -> int:
        return sum(isinstance(each.outcome, Dead) for each in self.attempts)

    @property
    def errors(self) -> list[BaseException]:
        failed = [each for each in self.attempts if isinstance(each.outcome, RetryIn | Dead)]
        return [each.error for each in failed if each.error is not None]

    def most_tried(self) -> str:
        """Who kept everybody busy, in words."""
        tried = Counter((each.queue, each.attempt.message.routing_key) for each in self.attempts)
        if not tried:
            return "no listener was called"
        [((queue, routing_key), count)] = tried.most_common(1)
        return f"{count} of them were for {routing_key!r} in {queue!r}"
