"""Printing: text of other programs, as one line without line breaks or control characters."""

from __future__ import annotations

import re

# What Python calls printable although it has no shape of its own: joiners, fillers and variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(text: str) -> str:
    """The text with everything that has no shape of its own written as an escape: `\\n`, `\\x1b`, `\\u202e`.

    Line breaks of every kind are among it, and so are marks of direction and characters of no width.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() and not _INVISIBLE.match(character):
        return character
    return character.encode("unicode_escape", errors="surrogatepass").decode()


def in_bytes(size: int) -> str:
    """A size for people."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
