"""ScanPosition: a scan may begin behind dead rows, but never for long: it finds what was passed from the beginning."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from outbox.stores.postgresql import selecting
from outbox.stores.postgresql.selecting import (
    BEGINNING,
    MANY,
    OVERTAKEN,
    RESPITE,
    SHORTEST_RESPITE,
    SLOW,
    ScanPosition,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUICK, LONG = SLOW / 2, 1.0  # seconds for a look


class Looking:
    """A head, and a clock that only its looks and the test move."""

    def __init__(self, dead: int = MANY + 1) -> None:
        self.dead = dead
        self.asked = 0
        self.now = 1000.0
        self.monotonic = self.perf_counter = lambda: self.now
        self._head = ScanPosition()

    def since(self, found: Sequence[datetime] = (), *, takes: float = QUICK, ended: bool = True) -> datetime:
        """Where a look begins, that finds messages due at these times."""
        with self._head.looking() as look:
            self.now += takes
            look.found = [(due_at,) for due_at in found]
            look.ended = ended
        if self._head.in_doubt:
            self.asked += 1
            self._head.counted(self.dead)
        return look.since


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Looking:
    looking = Looking()
    monkeypatch.setattr(selecting, "time", looking)
    return looking


def test_quick_looks_begin_at_the_beginning_and_ask_for_nobody(looking: Looking) -> None:
    assert [looking.since([NOON]) for _ in range(5)] == [BEGINNING] * 5
    assert looking.asked == 0


def test_slow_looks_over_few_dead_begin_at_the_beginning(looking: Looking) -> None:
    looking.dead = MANY
    assert [looking.since([NOON], takes=LONG) for _ in range(5)] == [BEGINNING] * 5
    assert looking.asked == 1, "asking is not free either"


def test_after_a_slow_look_over_many_dead_the_next_ones_begin_where_it_ended(looking: Looking) -> None:
    assert looking.since([NOON, NOON + timedelta(seconds=1)], takes=LONG) == BEGINNING
    assert looking.since([NOON + timedelta(seconds=5)]) == NOON + timedelta(seconds=1) - OVERTAKEN
    assert looking.since() == NOON + timedelta(seconds=5) - OVERTAKEN
    assert looking.since() == NOON + timedelta(seconds=5) - OVERTAKEN


def test_after_a_while_a_look_begins_at_the_beginning_again(looking: Looking) -> None:
    """A message whose transaction took long to commit, or whose lease ran out, lies behind the head."""
    looking.since([NOON], takes=LONG)
    looking.now += RESPITE * LONG - QUICK
    assert looking.since() > BEGINNING
    looking.now += QUICK
    assert looking.since() == BEGINNING


def test_the_while_is_never_shorter_than_a_second_and_grows_with_the_cost(looking: Looking) -> None:
    for takes in (SLOW * 1.5, 3.0):
        looking.now += 1000
        assert looking.since([NOON], takes=takes) == BEGINNING
        looking.now += max(SHORTEST_RESPITE, RESPITE * takes) - QUICK / 2
        assert looking.since() > BEGINNING
        assert looking.since() == BEGINNING


def test_whoever_was_overtaken_is_not_passed_by_when_one_look_cannot_hold_them_all(looking: Looking) -> None:
    looking.since([NOON], takes=LONG)
    looking.now += RESPITE * LONG
    early = NOON - timedelta(hours=1)
    assert looking.since([early], takes=LONG, ended=False) == BEGINNING
    assert looking.since() == early - OVERTAKEN


def test_a_look_that_ended_goes_on_from_the_farthest_that_was_ever_reached(looking: Looking) -> None:
    looking.since([NOON], takes=LONG)
    looking.now += RESPITE * LONG
    assert looking.since([NOON - timedelta(hours=1)], takes=LONG) == BEGINNING
    assert looking.since() == NOON - OVERTAKEN
