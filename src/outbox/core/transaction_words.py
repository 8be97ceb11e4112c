"""Transaction words: the SQL text by which a statement ends a transaction, begins one, or sets its isolation."""

from __future__ import annotations

import re
from collections.abc import Iterator

# The first word of a statement decides.
FIRST_WORD = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*(?>.*?\*/))*+"  # never tried in another way: there may be many comments
    r"(?:(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b"
    r"|(ROLLBACK)\b(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b)"
    r"|(SET)\s+(?:LOCAL\s+|SESSION\s+)?(?:CHARACTERISTICS\s+AS\s+)?"
    r"(?:TRANSACTION\s[^;]*?\bISOLATION\b|(?:default_)?transaction_isolation\b))",
    re.IGNORECASE | re.DOTALL,
)


# What a `;` or a word means nothing in. Two quotes in a row are two texts, and backslashes count behind an E alone.
_OPAQUE = re.compile(
    r"\bE'(?:[^'\\]|\\.|'')*+'|'[^']*+'|\"[^\"]*+\"|(?<![\w$])\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*+|/\*.*?\*/",
    re.IGNORECASE | re.DOTALL,
)
_BODY = re.compile(r"\s*CREATE\b.*\bBEGIN\b", re.IGNORECASE | re.DOTALL)  # of a function or a trigger: END closes it


def transaction_words(statement: str) -> Iterator[str]:
    """The words by which a text of one or more statements would end a transaction, begin one, or set its isolation."""
    is_body = False
    for part in _parts(statement):
        found = FIRST_WORD.match(part)
        word = None if found is None else (found[1] or found[2] or found[3]).upper()
        if is_body:
            is_body = word != "END"
        elif word is not None:
            yield word
        else:
            is_body = _BODY.match(part) is not None


def _parts(statement: str) -> list[str]:
    return [statement] if statement.find(";", 0, -1) < 0 else _OPAQUE.sub(" ", statement).split(";")
