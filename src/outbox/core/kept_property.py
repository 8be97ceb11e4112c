"""kept_property: a value that is made when it is first read, and kept, without a lock.

Up to Python 3.11 `functools.cached_property` has a lock for a whole class, held while a value is made. If that takes a
while, all other threads wait for it, and a child that is forked meanwhile waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value", covariant=True)


class kept_property(Generic[Value]):  # noqa: N801 - it is read as `property` is
    """A property whose first value stays in the instance. Of threads that are first together all get the same one.

    So each of them may make a value, and it must not matter that all but one are thrown away.
    """

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        made = self._make(instance)
        kept: Value = vars(instance).setdefault(self._name, made)  # later reads find it there, and call nothing
        return kept
