"""Backoff: how long to wait before looking again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.backoff import SHORTEST, Backoff


def test_pauses_double_until_the_longest_one() -> None:
    pace = Backoff(1.0, 0.1)
    assert [pace.pause() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_activity_makes_the_pauses_short_again() -> None:
    pace = Backoff(1.0, 0.1)
    for _ in range(5):
        pace.pause()
    pace.reset()
    assert [pace.pause(), pace.pause()] == pytest.approx([0.1, 0.2])


def test_without_a_word_the_shortest_pause_is_fifty_milliseconds() -> None:
    assert SHORTEST == 0.05
    assert Backoff(1.0).pause() == 0.05


@given(st.floats(min_value=0.001, max_value=1000), st.floats(min_value=0.001, max_value=1000))
def test_pauses_never_shrink_by_themselves_and_never_pass_the_longest(longest: float, shortest: float) -> None:
    pace = Backoff(longest, shortest)
    pauses = [pace.pause() for _ in range(40)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(pauses))
    assert 0 < pauses[0] <= pauses[-1] <= longest
