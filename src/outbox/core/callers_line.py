"""CallersLine: the line of the application that a warning is about, however deep in the library it is found."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, NamedTuple, Self

import greenlet

# What may stand between the application and the library.
_BETWEEN = ("outbox.", "sqlalchemy.")
_MODULES = ("outbox", "sqlalchemy", "contextlib")


class CallersLine(NamedTuple):
    """Where the application called the library."""

    file: str
    line: int
    namespace: dict[str, Any]  # of the module, in which Python notes what it has shown already

    @classmethod
    def here(cls) -> Self:
        """The line that led to this call, through a greenlet of SQLAlchemy too."""
        own = frame = sys._getframe(1)
        here = greenlet.getcurrent()
        while True:
            name = str(frame.f_globals.get("__name__"))
            if not name.startswith(_BETWEEN) and name not in _MODULES:
                break
            outer: FrameType | None = frame.f_back
            if outer is None and here.parent is not None:  # the coroutine that waits for the greenlet
                here = here.parent
                outer = here.gr_frame
            if outer is None:
                frame = own
                break
            frame = outer
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)

    def warn(self, text: str, category: type[Warning]) -> None:
        """Give a warning that names this line."""
        module, shown = self.namespace.get("__name__"), self.namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, category, self.file, self.line, module=module, registry=shown)
