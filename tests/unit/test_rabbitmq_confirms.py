"""Which publishes are confirmed, and which deliveries are acknowledged: nothing that was not, and nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.settlement import Settlement
from outbox.transports.rabbitmq.acknowledging import Acknowledgements
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Confirms, Outgoing, Window


def batch(*ids: str, routing_key: str = "k") -> list[Outgoing]:
    return [Outgoing("e", routing_key, b"", b"", id) for id in ids]


async def test_an_acknowledgement_counts_for_its_own_publish_alone() -> None:
    confirms = Confirms()
    first, second = confirms.expect(batch("a", "b", "c")), confirms.expect(batch("d"))
    confirms.answered(2, False, BrokerAnswer.CONFIRMED)
    assert first.answers == [BrokerAnswer.UNKNOWN, BrokerAnswer.CONFIRMED, BrokerAnswer.UNKNOWN]
    confirms.answered(4, True, BrokerAnswer.CONFIRMED)
    assert first.answers == [BrokerAnswer.CONFIRMED] * 3
    assert second.answers == [BrokerAnswer.CONFIRMED]
    assert first.done.done() and second.done.done()


async def test_a_publish_that_was_returned_is_not_confirmed_by_its_acknowledgement() -> None:
    confirms = Confirms()
    window = confirms.expect([*batch("a", "b"), *batch("b", routing_key="other")])
    confirms.returned("e", "other", "b")
    confirms.returned("e", "k", "nobody's")
    confirms.answered(3, True, BrokerAnswer.CONFIRMED)
    assert window.answers == [BrokerAnswer.CONFIRMED, BrokerAnswer.CONFIRMED, BrokerAnswer.RETURNED]


async def test_of_two_publishes_of_one_message_each_return_counts_once() -> None:
    confirms = Confirms()
    window = confirms.expect(batch("a", "a"))
    confirms.returned("e", "k", "a")
    confirms.returned("e", "k", "a")
    confirms.answered(2, True, BrokerAnswer.CONFIRMED)
    assert window.answers == [BrokerAnswer.RETURNED, BrokerAnswer.RETURNED]


async def test_a_rejection_is_none_of_the_others_business() -> None:
    confirms = Confirms()
    window = confirms.expect(batch("a", "b", "c"))
    confirms.answered(2, False, BrokerAnswer.REJECTED)
    confirms.answered(3, True, BrokerAnswer.CONFIRMED)
    assert window.answers == [BrokerAnswer.CONFIRMED, BrokerAnswer.REJECTED, BrokerAnswer.CONFIRMED]


async def test_what_has_no_answer_at_the_end_is_unknown() -> None:
    confirms = Confirms()
    window = confirms.expect(batch("a", "b"))
    confirms.answered(1, False, BrokerAnswer.CONFIRMED)
    confirms.answered(99, False, BrokerAnswer.CONFIRMED)
    confirms.end()
    assert window.done.done()
    assert window.answers == [BrokerAnswer.CONFIRMED, BrokerAnswer.UNKNOWN]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    answers=st.lists(st.tuples(st.integers(0, 25), st.booleans(), st.booleans()), max_size=30),
)
def test_every_publish_has_the_first_answer_that_was_meant_for_it(
    sizes: list[int], answers: list[tuple[int, bool, bool]]
) -> None:
    async def answered() -> list[Window]:
        confirms = Confirms()
        windows = [confirms.expect(batch(*map(str, range(size)))) for size in sizes]
        for tag, multiple, positive in answers:
            confirms.answered(tag, multiple, BrokerAnswer.CONFIRMED if positive else BrokerAnswer.REJECTED)
        return windows

    expected = dict.fromkeys(range(1, sum(sizes) + 1), BrokerAnswer.UNKNOWN)
    for tag, multiple, positive in answers:
        for each in range(1, tag + 1) if multiple else [tag]:
            if expected.get(each) is BrokerAnswer.UNKNOWN:
                expected[each] = BrokerAnswer.CONFIRMED if positive else BrokerAnswer.REJECTED
    windows = asyncio.run(answered())
    assert [answer for window in windows for answer in window.answers] == list(expected.values())
    for window in windows:
        assert window.done.done() == (BrokerAnswer.UNKNOWN not in window.answers)


class Broker:
    """What a broker believes about the deliveries of a channel. A number it does not know closes the channel."""

    def __init__(self, delivered: int) -> None:
        self.unacknowledged = set(range(1, delivered + 1))
        self.acknowledged: set[int] = set()

    def hear(self, acks: Sequence[tuple[int, bool]]) -> None:
        for tag, multiple in acks:
            assert tag in self.unacknowledged
            meant = {each for each in self.unacknowledged if each <= tag} if multiple else {tag}
            self.unacknowledged -= meant
            self.acknowledged |= meant

    def take_back(self, tag: int) -> None:
        assert tag in self.unacknowledged
        self.unacknowledged.discard(tag)


@given(
    order=st.permutations(range(1, 13)),
    given_back=st.sets(st.integers(1, 12)),
    left_open=st.sets(st.integers(1, 12)),
    pauses=st.lists(st.sampled_from([0.0, 0.04, 0.2]), min_size=12, max_size=12),
)
def test_what_is_settled_is_acknowledged_and_nothing_else(
    order: list[int], given_back: set[int], left_open: set[int], pauses: list[float]
) -> None:
    broker, acknowledgements = Broker(12), Acknowledgements()
    landings: dict[int, Settlement] = {}
    now = 0.0
    for tag, pause in zip(order, pauses, strict=True):
        now += pause
        if tag in left_open:
            continue
        if tag in given_back:
            acknowledgements.settled(tag)
            broker.take_back(tag)
        else:
            landings[tag] = Settlement()
            acknowledgements.done(tag, landings[tag], now)
        words = acknowledgements.words(now)
        broker.hear(words.acks)
        for landing in words.settlements:
            landing.set_result(True)
        assert broker.acknowledged == {tag for tag, landing in landings.items() if landing.done()}
        assert broker.acknowledged <= set(landings)
    words = acknowledgements.words(now + 1.0)  # nobody waits longer for one that stays open
    broker.hear(words.acks)
    assert broker.acknowledged == set(landings)
    assert broker.unacknowledged == left_open
    assert not acknowledgements.waiting


def test_whoever_waits_is_let_go_when_the_channel_ends() -> None:
    acknowledgements = Acknowledgements()
    first, third = Settlement(), Settlement()
    acknowledgements.done(1, first, 0.0)
    acknowledgements.done(3, third, 0.0)
    assert acknowledgements.abandon() == [first, third]
    assert acknowledgements.words(9.0).acks in ([], [(1, True)])
