"""Forks: what a child process has from its parent and must not use."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """What has something to forget in a child process."""

    def forked(self) -> None:
        """Called first in a child, in which no other thread runs and no event loop."""
        ...


_forkable: WeakSet[Any] = WeakSet()
_inherited: list[object] = []


def forget_after_fork(owner: Forkable) -> None:
    """Let it be told in a child process. This does not keep it alive."""
    _forkable.add(owner)


def never_collect(inherited: object) -> None:
    """Keep what is the parent's: drivers close what is collected, and the parent still uses it."""
    _inherited.append(inherited)


def lead_nowhere(descriptor: int) -> None:
    """Cut this process off from a socket that another one has too, which does not notice."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)


class ForkableLock:
    """A lock that no child inherits held by a thread which it does not have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        forget_after_fork(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def forked(self) -> None:
        self._lock = threading.Lock()


def _in_child() -> None:
    for owner in list(_forkable):
        with suppress(Exception):  # whatever it is, the others are told too
            owner.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
