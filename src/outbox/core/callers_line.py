"""CallersLine: the line of the application that a warning is about, however deep in the library it is found."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Self

import greenlet

_LIBRARIES = ("outbox", "sqlalchemy", "contextlib")  # what may stand between the application and its line


class CallersLine(NamedTuple):
    """Where the application called the library."""

    file: str
    line: int
    namespace: dict[str, Any]  # of the module, in which Python notes what it has shown already

    @classmethod
    def here(cls) -> Self:
        """The line that led to this call."""
        own = sys._getframe(1)
        frame = next((frame for frame in _outwards(own) if not _is_of_a_library(frame)), own)
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)

    def warn(self, text: str, category: type[Warning]) -> None:
        """Give a warning that names this line."""
        module, shown = self.namespace.get("__name__"), self.namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, category, self.file, self.line, module=module, registry=shown)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, from a greenlet of SQLAlchemy on to the coroutine that waits for it."""
    here = greenlet.getcurrent()
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None and here.parent is not None:
            here = here.parent
            frame = here.gr_frame


def _is_of_a_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES
