"""How much a consumer takes, and which of its messages are suspected of killing workers."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands

from outbox.core.listener import Listener
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.poison import PoisonSuspects, Verdict
from outbox.transports.rabbitmq.prefetching import ConsumerPrefetch

KEY = ("queue", "id")


def envelope(**headers: Any) -> Envelope:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Envelope.read(commands.Basic.Properties(message_id="id", headers=named).marshal())


def listener(max_crashes: int = 3) -> Listener:
    return Listener("#", print, queue="queue", max_crashes=max_crashes)


def handled(prefetch: ConsumerPrefetch, within: float, now: float) -> float:
    """A whole prefetch, handled in so many seconds; what time it is then."""
    for _ in range(prefetch.prefetch):
        prefetch.settled(now + within)
    return now + within


async def test_a_listener_that_is_quick_takes_more_and_one_that_is_slow_less() -> None:
    prefetch = ConsumerPrefetch(at_work=10, most=1000, now=0.0)
    assert prefetch.prefetch == 20
    now = handled(prefetch, 0.05, 0.0)
    assert (prefetch.prefetch, prefetch.changed.is_set()) == (80, True)
    prefetch.changed.clear()
    now = handled(prefetch, 0.5, now)
    assert (prefetch.prefetch, prefetch.changed.is_set()) == (80, False)
    for _ in range(10):
        now = handled(prefetch, 0.01, now)
    assert prefetch.prefetch == 500
    for _ in range(10):
        now = handled(prefetch, 5.0, now)
    assert prefetch.prefetch == 20


@pytest.mark.parametrize("most", [1, 2, 15])
async def test_it_never_takes_more_than_it_may(most: int) -> None:
    prefetch = ConsumerPrefetch(at_work=10, most=most, now=0.0)
    now = handled(prefetch, 0.01, 0.0)
    handled(prefetch, 0.01, now)
    assert prefetch.prefetch == most


async def test_messages_that_wait_to_be_tried_take_up_no_prefetch() -> None:
    prefetch = ConsumerPrefetch(at_work=10, most=1000, now=0.0)
    prefetch.waiting(10)
    assert (prefetch.in_flight, prefetch.changed.is_set()) == (20, False)  # half of it is for others
    grown: list[int] = []
    for waiting in range(11, 1000):
        prefetch.waiting(waiting)
        assert prefetch.in_flight - waiting >= 10
        if prefetch.changed.is_set():
            grown.append(prefetch.in_flight)
            prefetch.changed.clear()
    assert len(grown) < 12, "each growth is a further consumer"
    for waiting in range(1000, 0, -1):
        prefetch.waiting(waiting)
    assert not prefetch.changed.is_set()
    prefetch.waiting(0)
    assert (prefetch.in_flight, prefetch.changed.is_set()) == (20, True)


@pytest.mark.parametrize(
    ("headers", "max_crashes", "expected"),
    [
        ({}, 3, (Verdict.TRUSTED, 0)),
        ({"x_delivery_count": 1}, 3, (Verdict.TRUSTED, 0)),
        ({"x_delivery_count": 2}, 3, (Verdict.SUSPECT, 2)),
        ({"x_delivery_count": 9}, 3, (Verdict.SUSPECT, 2)),
        ({"x_delivery_count": 1}, 1, (Verdict.SUSPECT, 0)),
        ({"x_delivery_count": 9, "outbox_crashes": 2}, 3, (Verdict.SUSPECT, 2)),
        ({"outbox_crashes": 3}, 3, (Verdict.DEAD, 3)),
        ({"outbox_crashes": 2, "outbox_on_trial": True}, 3, (Verdict.ISOLATED, 2)),
        ({"x_delivery_count": 1, "outbox_crashes": 2, "outbox_on_trial": True}, 3, (Verdict.DEAD, 3)),
        ({"x_delivery_count": 1, "outbox_crashes": 0, "outbox_on_trial": True}, 1, (Verdict.DEAD, 1)),
    ],
)
def test_only_a_crash_in_its_trial_condemns_a_message(
    headers: dict[str, Any], max_crashes: int, expected: tuple[Verdict, int]
) -> None:
    assert PoisonSuspects().judge(envelope(**headers), KEY, listener(max_crashes)) == expected


def test_a_lost_channel_is_no_crash() -> None:
    suspects = PoisonSuspects()
    suspects.clear(envelope(x_delivery_count=1), KEY)
    assert suspects.judge(envelope(x_delivery_count=2), KEY, listener()) == (Verdict.TRUSTED, 0)
    assert suspects.judge(envelope(x_delivery_count=2), ("another", "id"), listener()) == (Verdict.SUSPECT, 2)
    tried = {"outbox_crashes": 2, "outbox_on_trial": True}
    assert suspects.judge(envelope(x_delivery_count=2, **tried), KEY, listener()) == (Verdict.ISOLATED, 2)


def test_a_channel_that_is_lost_during_a_trial_is_no_crash() -> None:
    suspects = PoisonSuspects()
    suspects.clear_isolated(envelope(outbox_crashes=3), KEY)
    assert suspects.judge(envelope(outbox_crashes=3), KEY, listener()) == (Verdict.SUSPECT, 2)
    assert suspects.judge(envelope(outbox_crashes=3), ("another", "id"), listener()) == (Verdict.DEAD, 3)
    assert suspects.judge(envelope(outbox_crashes=4), KEY, listener()) == (Verdict.DEAD, 4)


async def test_one_suspect_is_tried_at_a_time() -> None:
    suspects = PoisonSuspects()
    sent: list[str] = []

    def turn(name: str, is_there: bool = True) -> bool:
        if is_there:
            sent.append(name)
        return is_there

    first, second, third = (("queue", name) for name in ("first", "second", "third"))
    suspects.wait(first, lambda: turn("first"))
    suspects.wait(second, lambda: turn("second", is_there=False))
    suspects.wait(third, lambda: turn("third"))
    assert sent == ["first"]
    assert not suspects.begin(third)
    assert suspects.begin(first)
    suspects.end(third)  # it is not its turn that ends
    assert sent == ["first"]
    suspects.end(first)
    assert sent == ["first", "third"]
