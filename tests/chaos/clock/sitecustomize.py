"""A clock that is wrong: with this folder on the PYTHONPATH, a process lives CHAOS_CLOCK_SHIFT seconds away from now.

Python imports a module of this name before anything else. Clocks that only go forward, such as `time.monotonic`, stay
as they are, because no operating system moves them either.
"""

import datetime
import os
import time

_SHIFT = float(os.environ.get("CHAOS_CLOCK_SHIFT", "0"))

_time, _time_ns = time.time, time.time_ns
_datetime = datetime.datetime


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _datetime)


class _Shifted(_datetime, metaclass=_Meta):
    """`datetime`, for whoever asks for now."""

    __slots__ = ()  # as large as the original, or compiled modules complain

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _datetime.now(tz) + datetime.timedelta(seconds=_SHIFT)

    @classmethod
    def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
        return _datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=_SHIFT)


if _SHIFT:
    time.time = lambda: _time() + _SHIFT
    time.time_ns = lambda: _time_ns() + int(_SHIFT * 1_000_000_000)
    datetime.datetime = _Shifted  # type: ignore[misc]
