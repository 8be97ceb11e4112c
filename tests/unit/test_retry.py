"""Retry policies: how long to wait after an attempt failed, or that nobody should try again."""

import math
import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import ConfigurationError, Reject, RetryPolicy
from outbox.core.durations import LONGEST
from outbox.core.retry import as_retry_policy

FAILURE = ConnectionError("the listener failed")
SHAPES = [
    pytest.param(RetryPolicy.constant, id="constant"),
    pytest.param(RetryPolicy.linear, id="linear"),
    pytest.param(RetryPolicy.exponential, id="exponential"),
    pytest.param(lambda delay, **options: RetryPolicy.sequence([delay] * 100, **options), id="sequence"),
    pytest.param(lambda delay, **options: RetryPolicy.calling(lambda *_: delay, **options), id="calling"),
]


def seconds(policy: RetryPolicy, attempts: int, error: BaseException = FAILURE) -> list[float | None]:
    """The delays after the first attempts, in seconds."""
    delays = [policy.delay(attempt, error) for attempt in range(1, attempts + 1)]
    return [None if delay is None else delay.total_seconds() for delay in delays]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetryPolicy.constant(5), [5, 5, 5, 5]),
        (RetryPolicy.constant(0), [0, 0, 0, 0]),
        (RetryPolicy.constant(timedelta(milliseconds=20)), [0.02, 0.02, 0.02, 0.02]),
        (RetryPolicy.linear(2), [2, 4, 6, 8]),
        (RetryPolicy.linear(2, 1), [2, 3, 4, 5]),
        (RetryPolicy.linear(2, 0), [2, 2, 2, 2]),
        (RetryPolicy.exponential(), [1, 2, 4, 8]),
        (RetryPolicy.exponential(1, 10), [1, 10, 100, 1000]),
        (RetryPolicy.exponential(3, 1), [3, 3, 3, 3]),
        (RetryPolicy.sequence((1, 10)), [1, 10, None, None]),
        (RetryPolicy.sequence(()), [None, None, None, None]),
        (RetryPolicy.sequence((0, 0.5)), [0, 0.5, None, None]),
        (RetryPolicy.calling(lambda attempt, error: attempt * 2 if attempt < 3 else None), [2, 4, None, None]),
        (RetryPolicy.exponential(1, cap=3), [1, 2, 3, 3]),
        (RetryPolicy.constant(1, attempts=3), [1, 1, None, None]),
        (RetryPolicy.constant(1, attempts=1), [None, None, None, None]),
        (RetryPolicy.sequence((1, 1), attempts=100), [1, 1, None, None]),
        (RetryPolicy.constant(10, total=30), [10, 10, 10, None]),
        (RetryPolicy.exponential(1, total=timedelta(seconds=7)), [1, 2, 4, None]),
        (RetryPolicy.exponential(1, total=6), [1, 2, None, None]),
        (RetryPolicy.exponential(1, cap=2, total=5), [1, 2, 2, None]),
        (RetryPolicy.constant(1, total=0), [None, None, None, None]),
    ],
)
def test_the_delays_follow_the_shape_and_its_bounds(policy: RetryPolicy, expected: list[float | None]) -> None:
    assert seconds(policy, 4) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetryPolicy.constant(5), {5}),
        (RetryPolicy.constant(5, attempts=1), set()),
        (RetryPolicy.constant(5, attempts=10**12), {5}),
        (RetryPolicy.constant(5, total=3), set()),
        (RetryPolicy.sequence((1, 10, 1, 60)), {1, 10, 60}),
        (RetryPolicy.sequence((1, 10, 1, 60), attempts=3), {1, 10}),
        (RetryPolicy.sequence(()), set()),
        (RetryPolicy.linear(2, attempts=4), {2, 4, 6}),
        (RetryPolicy.exponential(1, cap=10), {1, 2, 4, 8, 10}),
        (RetryPolicy.exponential(1, total=7), {1, 2, 4}),
        (RetryPolicy.exponential(1), None),
        (RetryPolicy.linear(1), None),
        (RetryPolicy.constant(5, jitter=0.1), None),
        (RetryPolicy.calling(lambda attempt, error: 5), None),
        (RetryPolicy(shape=lambda attempt, error: timedelta(seconds=5)), None),
    ],
)
def test_a_policy_lists_its_delays_if_the_attempts_number_alone_decides(
    policy: RetryPolicy, expected: set[float] | None
) -> None:
    known = policy.known_delays()
    assert known is None if expected is None else known is not None
    assert {delay.total_seconds() for delay in known or ()} == (expected or set())


def test_a_function_is_asked_with_the_attempts_number_and_the_error() -> None:
    asked: list[tuple[int, BaseException]] = []

    def decide(attempt_count: int, error: BaseException) -> int:
        asked.append((attempt_count, error))
        return 7

    assert seconds(as_retry_policy(decide), 2) == [7, 7]
    assert asked == [(1, FAILURE), (2, FAILURE)]


@pytest.mark.parametrize("make", SHAPES)
def test_every_shape_takes_every_option(make: Any) -> None:
    policy = make(4, attempts=3, cap=3, total=100, jitter=0.0, only=OSError, never=TimeoutError)
    assert seconds(policy, 3) == [3, 3, None]
    assert seconds(policy, 1, KeyError("x")) == [None]
    assert seconds(policy, 1, TimeoutError()) == [None]


@pytest.mark.parametrize("make", SHAPES)
def test_a_rejected_message_is_never_retried(make: Any) -> None:
    assert make(1).delay(1, Reject("never")) is None


@pytest.mark.parametrize("only", [OSError, (OSError, KeyError), (ConnectionError, KeyError)])
def test_only_names_the_errors_that_are_retried_with_their_subclasses(only: Any) -> None:
    policy = RetryPolicy.constant(1, only=only)
    assert policy.delay(1, ConnectionRefusedError()) is not None
    assert policy.delay(1, ValueError()) is None


def test_never_wins_over_only() -> None:
    policy = RetryPolicy.constant(1, only=OSError, never=(FileNotFoundError,))
    assert policy.delay(1, PermissionError()) is not None
    assert policy.delay(1, FileNotFoundError()) is None


@given(st.floats(min_value=0, max_value=1), st.integers(min_value=1, max_value=8))
def test_jitter_spreads_a_delay_around_its_length(jitter: float, attempt: int) -> None:
    policy = RetryPolicy.exponential(1, jitter=jitter)
    delay = policy.delay(attempt, FAILURE)
    assert delay is not None
    length = 2 ** (attempt - 1)
    slack = 1e-6
    assert length * (1 - jitter) - slack <= delay.total_seconds() <= length * (1 + jitter) + slack


def test_jitter_makes_delays_differ() -> None:
    policy = RetryPolicy.constant(100, jitter=0.5)
    assert len({policy.delay(1, FAILURE) for _ in range(20)}) > 1


def test_no_delay_is_longer_than_the_cap_jitter_included() -> None:
    policy = RetryPolicy.constant(10, cap=5, jitter=0.5)
    longest = max(policy.delay(1, FAILURE) or timedelta(0) for _ in range(200))
    assert longest <= timedelta(seconds=5)


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy.exponential(1),
        RetryPolicy.exponential(1, 1e300),
        RetryPolicy.exponential(1, math.inf),
        RetryPolicy.linear(timedelta(days=36_000)),
    ],
)
@pytest.mark.parametrize("attempt", [50, 10_000, 10**9])
def test_delays_grow_to_a_century_and_not_into_an_overflow(policy: RetryPolicy, attempt: int) -> None:
    assert policy.delay(attempt, FAILURE) == LONGEST


def test_a_policy_is_told_apart_from_a_sequence_and_a_function() -> None:
    policy = RetryPolicy.constant(1)
    assert as_retry_policy(policy) is policy
    assert seconds(as_retry_policy([3, timedelta(seconds=4)]), 3) == [3, 4, None]
    assert seconds(as_retry_policy(()), 1) == [None]


@pytest.mark.parametrize("value", [None, 5, 1.5, "1,10", b"\x01", {1}, {1: 2}, timedelta(1), object()])
def test_what_is_no_retry_policy_is_refused_with_the_ways_to_write_one(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"retry_delays=.*sequence.*RetryPolicy.*function"):
        as_retry_policy(value)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: RetryPolicy.constant(1, attempts=0), id="no attempts"),
        pytest.param(lambda: RetryPolicy.constant(1, attempts=-1), id="negative attempts"),
        pytest.param(lambda: RetryPolicy.constant(1, attempts="3"), id="attempts as text"),
        pytest.param(lambda: RetryPolicy.constant(1, attempts=1.5), id="half an attempt"),
        pytest.param(lambda: RetryPolicy.constant(1, jitter=-0.1), id="negative jitter"),
        pytest.param(lambda: RetryPolicy.constant(1, jitter=1.1), id="more jitter than delay"),
        pytest.param(lambda: RetryPolicy.constant(1, jitter=math.nan), id="jitter that is no number"),
        pytest.param(lambda: RetryPolicy.constant(1, jitter="0.2"), id="jitter as text"),
        pytest.param(lambda: RetryPolicy.exponential(1, 0.5), id="a factor that shrinks"),
        pytest.param(lambda: RetryPolicy.exponential(1, math.nan), id="a factor that is no number"),
        pytest.param(lambda: RetryPolicy.exponential(1, "2"), id="a factor as text"),  # type: ignore[arg-type]
        pytest.param(lambda: RetryPolicy.constant(1, only=("KeyError",)), id="an error by its name"),
        pytest.param(lambda: RetryPolicy.constant(1, only="KeyError"), id="an error by its name alone"),
        pytest.param(lambda: RetryPolicy.constant(1, never=[1]), id="an error that is a number"),
        pytest.param(lambda: RetryPolicy.constant(-1), id="a negative delay"),
        pytest.param(lambda: RetryPolicy.constant("1"), id="a delay as text"),  # type: ignore[arg-type]
        pytest.param(lambda: RetryPolicy.linear(1, -1), id="a negative step"),
        pytest.param(lambda: RetryPolicy.sequence((1, -1)), id="a negative delay in a sequence"),
        pytest.param(lambda: RetryPolicy.sequence((1, None)), id="nothing in a sequence"),  # type: ignore[arg-type]
        pytest.param(lambda: RetryPolicy.constant(1, cap="x"), id="a cap as text"),
        pytest.param(lambda: RetryPolicy.constant(1, total=-1), id="a negative total"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_errors_may_be_listed_as_one_likes() -> None:
    policy = RetryPolicy.constant(1, only=[OSError, KeyError])
    assert policy.delay(1, KeyError("x")) is not None
    assert policy.delay(1, ValueError()) is None


class Overloaded(ConnectionError): ...


BY_ERROR = RetryPolicy.by_error({OSError: (1, 2), Overloaded: RetryPolicy.constant(60), Exception: ()})


@pytest.mark.parametrize(
    ("error", "delays"),
    [
        (OSError(), [1, 2, None]),
        (ConnectionError(), [1, 2, None]),
        (Overloaded(), [60, 60, 60]),
        (ValueError(), [None, None, None]),
        (KeyboardInterrupt(), [None, None, None]),
        (Reject(), [None, None, None]),
    ],
)
def test_the_nearest_class_of_an_error_decides(error: BaseException, delays: list[int | None]) -> None:
    said = [BY_ERROR.delay(attempt, error) for attempt in (1, 2, 3)]
    assert said == [None if delay is None else timedelta(seconds=delay) for delay in delays]


def test_the_delays_of_a_policy_by_error_can_be_listed_if_all_of_its_parts_can() -> None:
    assert BY_ERROR.known_delays() == tuple(timedelta(seconds=delay) for delay in (1, 2, 60))
    assert RetryPolicy.by_error({OSError: lambda attempt, error: 1, Exception: ()}).known_delays() is None
    assert RetryPolicy.by_error({Exception: (1,)}, jitter=0.5).known_delays() is None


def test_options_hold_for_a_policy_by_error_as_a_whole() -> None:
    policy = RetryPolicy.by_error({Exception: RetryPolicy.constant(60)}, attempts=2, cap=5)
    assert (policy.delay(1, OSError()), policy.delay(2, OSError())) == (timedelta(seconds=5), None)


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy.exponential(1, 2, cap=300),
        RetryPolicy.exponential(1, 3),
        RetryPolicy.constant(0, total=10),
        RetryPolicy.linear(0.001, 0, total=10**6, cap=1),
    ],
    ids=["exponential", "of three", "constant", "linear"],
)
def test_a_huge_number_of_attempts_costs_neither_time_nor_memory(policy: RetryPolicy) -> None:
    began = time.process_time()
    for attempt in (10**9, 2**31 - 1, 2**63 - 1):
        policy.delay(attempt, ValueError())
    assert time.process_time() - began < 1
