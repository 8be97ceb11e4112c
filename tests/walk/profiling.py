"""Profiling: which functions of the library one message passes, in their order."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import outbox

PACKAGE = Path(outbox.__file__).parent


@dataclass
class Walk:
    """The calls of functions of the library while one message was on its way, as (file, qualified name).

    A coroutine counts once, however often it waits. Lambdas and comprehensions belong to what they stand in.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # which of them came from another file, or from the event loop

    @property
    def files(self) -> frozenset[str]:
        return frozenset(file for file, _ in self.calls)

    def entered_again(self, begin: int = 0, end: int | None = None) -> Counter[str]:
        """How often each file was entered again, of the calls from one to another.

        A file that calls others and goes on is not left. It is entered by a call that comes from another file.
        """
        calls = self.calls[:end]
        entered = Counter(calls[index][0] for index in self.entries if begin <= index < len(calls))
        return Counter({file: count - 1 for file, count in entered.items() if count > 1})


class Profiler:
    """Notes calls between `begin` and `end`, in this thread and in those that begin while this is open.

    A thread can only be profiled from its beginning: this is opened before anything is started.
    """

    def __init__(self) -> None:
        self._walk: Walk | None = None

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def begin(self) -> Walk:
        self._walk = Walk()
        return self._walk

    def end(self) -> None:
        """Whatever is called from here on is no part of the walk."""
        self._walk = None

    def _note(self, frame: FrameType, kind: str, _: Any) -> None:
        walk = self._walk
        if walk is not None and kind == "call" and (passed := passes(frame)) is not None:
            if _calling_file(frame) != passed[0]:
                walk.entries.append(len(walk.calls))
            walk.calls.append(passed)


def passes(frame: FrameType) -> tuple[str, str] | None:
    """The file and the qualified name of a function of ours, if it begins."""
    file = _file(frame.f_code)
    return (file, frame.f_code.co_qualname) if file is not None and _begins(frame) else None


_files: dict[CodeType, str | None] = {}


def _file(code: CodeType) -> str | None:
    """The file of a function of ours, as it is named in the package."""
    if code not in _files:
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(PACKAGE) and not code.co_name.startswith("<")
        _files[code] = path.relative_to(PACKAGE).as_posix() if is_ours else None
    return _files[code]


def _calling_file(frame: FrameType) -> str | None:
    """The nearest file of ours from which a function was called; none if the event loop or a thread began it."""
    caller = frame.f_back
    while caller is not None and _file(caller.f_code) is None:
        caller = caller.f_back
    return None if caller is None else _file(caller.f_code)


def _begins(frame: FrameType) -> bool:
    """Whether a function begins, and no coroutine or generator goes on: the instruction RESUME says which."""
    return frame.f_code.co_code[frame.f_lasti + 1] & 3 == 0
