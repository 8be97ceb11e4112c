"""RetryPolicy: the delays between attempts; when they are used up the message is dead."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

from outbox.core.durations import LONGEST, NO_DELAY, Seconds, as_delay, configured
from outbox.core.errors import ConfigurationError, Reject

RetryFunction = Callable[[int, BaseException], Seconds | None]

MOST_KNOWN = 24  # distinct delays that a policy lists beforehand: more are as good as unknown
_FAR = 1000  # attempts after which a policy has shown all that it does


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Says how long to wait after attempt number n failed, or that there is no further attempt.

    Made by `constant`, `linear`, `exponential`, `sequence` or `calling`; the options below fit all of them.
    """

    shape: Callable[[int, BaseException], timedelta | None]
    attempts: int | None = None  # attempts in all, the first included; none: as many as the shape gives
    cap: timedelta | None = None  # no single delay is longer
    total: timedelta | None = None  # the delays together, before jitter, are no longer
    jitter: float = 0.0  # 0.2 spreads a delay evenly over 80 % to 120 % of it, so that retries do not come in waves
    only: tuple[type[BaseException], ...] = ()  # retry these errors and no others; empty: all
    never: tuple[type[BaseException], ...] = ()  # do not retry these errors
    regular: bool = False  # the attempt's number alone decides, before jitter
    choices: tuple[RetryPolicy, ...] = ()  # the error alone decides which of these it is

    def __post_init__(self) -> None:
        if self.attempts is not None and (not isinstance(self.attempts, int) or self.attempts < 1):
            raise ConfigurationError(f"attempts={self.attempts}: the first attempt counts, so at least 1")
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter={self.jitter}: a fraction between 0 and 1")
        for name in ("only", "never"):
            kinds = getattr(self, name)
            if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
                raise ConfigurationError(f"{name}={kinds!r}: exception classes")

    @classmethod
    def constant(cls, delay: Seconds, **options: object) -> Self:
        """The same delay each time."""
        pause = configured(as_delay, delay)
        return cls._with(lambda attempt_count, error: pause, options, regular=True)

    @classmethod
    def linear(cls, first: Seconds, step: Seconds | None = None, **options: object) -> Self:
        """`first`, then `step` more each time (`first` more if no step is given)."""
        start, more = configured(as_delay, first), configured(as_delay, first if step is None else step)
        return cls._with(lambda attempt_count, error: _times(start, 1, more, attempt_count - 1), options, regular=True)

    @classmethod
    def exponential(cls, first: Seconds = 1, factor: float = 2.0, **options: object) -> Self:
        """`first`, then `factor` times as long each time."""
        start = configured(as_delay, first)
        if not isinstance(factor, int | float) or not factor >= 1:
            raise ConfigurationError(f"factor={factor}: at least 1, or the delays would shrink")
        return cls._with(lambda attempt_count, error: _power(start, factor, attempt_count - 1), options, regular=True)

    @classmethod
    def sequence(cls, delays: Sequence[Seconds], **options: object) -> Self:
        """These delays, one after another; none at all means no retries."""
        pauses = tuple(configured(as_delay, delay, what="retry_delays") for delay in delays)
        return cls._with(
            lambda attempt_count, error: pauses[attempt_count - 1] if attempt_count <= len(pauses) else None,
            options,
            regular=True,
        )

    @classmethod
    def calling(cls, function: RetryFunction, **options: object) -> Self:
        """What `function(attempt_count, error)` says: seconds, a timedelta, or None for no more."""

        def shape(attempt_count: int, error: BaseException) -> timedelta | None:
            delay = function(attempt_count, error)
            return None if delay is None else as_delay(delay)

        return cls._with(shape, options)

    @classmethod
    def by_error(cls, policies: Mapping[type[Exception], RetryDelays], **options: object) -> Self:
        """For each class of errors a policy of its own; the nearest class counts, `Exception` is for all others."""
        chosen = {kind: as_retry_policy(policy) for kind, policy in policies.items()}
        if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in chosen):
            raise ConfigurationError(f"retry_delays by error: exception classes as keys, not {[*chosen]!r}")
        if Exception not in chosen:
            raise ConfigurationError("retry_delays by error: say what becomes of all other errors, with Exception: (…)")

        def shape(attempt_count: int, error: BaseException) -> timedelta | None:
            kind = next((each for each in type(error).__mro__ if each in chosen), Exception)
            return chosen[kind].delay(attempt_count, error)

        return cls._with(shape, {**options, "choices": tuple(chosen.values())})

    def delay(self, attempt_count: int, error: BaseException) -> timedelta | None:
        """How long to wait after this attempt failed; None: never again."""
        if isinstance(error, Reject) or not self._retries(error):
            return None
        if self.attempts is not None and attempt_count >= self.attempts:
            return None
        pause = self._pause(attempt_count, error)
        if pause is None or self._used_up(attempt_count, error):
            return None
        spread = 1 + self.jitter * random.uniform(-1, 1)  # noqa: S311 - spreads load, keeps no secret
        return pause * spread if self.cap is None else min(self.cap, pause * spread)

    def known_delays(self) -> tuple[timedelta, ...] | None:
        """Each delay that this policy can give, once; None: a function, jitter or sheer number leaves them open."""
        if self.choices and not self.jitter and self.cap is None:
            return _together([choice.known_delays() for choice in self.choices])
        if not self.regular or self.jitter:
            return None
        delays: dict[timedelta, None] = {}
        waited = NO_DELAY
        for attempt_count in range(1, min(self.attempts or _FAR, _FAR)):
            pause = self._pause(attempt_count, Exception())
            if pause is None:
                break
            waited = min(LONGEST, waited + pause)
            if self.total is not None and waited > self.total:
                break
            delays[pause] = None
        return tuple(delays) if len(delays) <= MOST_KNOWN else None

    def _retries(self, error: BaseException) -> bool:
        return not isinstance(error, self.never) and (not self.only or isinstance(error, self.only))

    def _pause(self, attempt_count: int, error: BaseException) -> timedelta | None:
        pause = self.shape(attempt_count, error)
        return pause if pause is None or self.cap is None else min(pause, self.cap)

    def _used_up(self, attempt_count: int, error: BaseException) -> bool:
        if self.total is None:
            return False
        waited = pause = NO_DELAY
        for earlier in range(1, min(attempt_count, _FAR) + 1):
            pause = self._pause(earlier, error) or NO_DELAY
            waited += pause
            if waited > self.total:
                return True
        return _times(waited, 1, pause, max(0, attempt_count - _FAR)) > self.total

    @classmethod
    def _with(
        cls,
        shape: Callable[[int, BaseException], timedelta | None],
        options: dict[str, object],
        *,
        regular: bool = False,
    ) -> Self:
        policy = cls(shape=shape, regular=regular)
        for name in ("cap", "total"):
            if options.get(name) is not None:
                options[name] = configured(as_delay, options[name], what=name)  # type: ignore[arg-type]
        for name in ("only", "never"):
            if isinstance(options.get(name), type):
                options[name] = (options[name],)
            elif name in options:
                options[name] = tuple(options[name])  # type: ignore[arg-type]
        return replace(policy, **options)  # type: ignore[arg-type]


RetryDelays = (
    RetryPolicy
    | Sequence[Seconds]
    | RetryFunction
    | Mapping[type[Exception], RetryPolicy | Sequence[Seconds] | RetryFunction]
)


def as_retry_policy(value: RetryDelays) -> RetryPolicy:
    """A policy from any of the ways in which one may be written."""
    if isinstance(value, RetryPolicy):
        return value
    if isinstance(value, Mapping):
        return RetryPolicy.by_error(value)
    if callable(value):
        return RetryPolicy.calling(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return RetryPolicy.sequence(value)
    raise ConfigurationError(
        f"retry_delays={value!r}: a sequence of seconds such as (1, 10, 60), a RetryPolicy, a function of the "
        "attempt's number and the error, or a mapping from classes of errors to one of these"
    )


def _together(known: Sequence[tuple[timedelta, ...] | None]) -> tuple[timedelta, ...] | None:
    delays: dict[timedelta, None] = {}
    for each in known:
        if each is None:
            return None
        delays.update(dict.fromkeys(each))
    return tuple(delays) if len(delays) <= MOST_KNOWN else None


def _times(start: timedelta, once: int, step: timedelta, count: int) -> timedelta:
    try:
        return min(LONGEST, start * once + step * count)
    except OverflowError:
        return LONGEST


def _power(start: timedelta, factor: float, exponent: int) -> timedelta:
    """A float overflows at once, where a whole number would grow until the memory is full."""
    try:
        return min(LONGEST, start * float(factor) ** exponent)
    except OverflowError:
        return LONGEST if start else NO_DELAY
