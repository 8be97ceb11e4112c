"""Tracking ids as headers, under two names: ours, a list, and that of kbairak's outbox, a JSON text.

Both are written and both are read, so that messages can be exchanged with services that use that library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring

from outbox.core.errors import Undecodable
from outbox.core.headers import ALSO_TRACKING_IDS

TRACKING_IDS = "outbox-tracking-ids"


def as_text(ids: Iterable[str]) -> str:
    """The ids as a JSON list."""
    return f"[{','.join(map(encode_basestring, ids))}]"


def from_text(text: object) -> list[object]:
    """The ids of a JSON list, or of a list; raises Undecodable."""
    if isinstance(text, list):
        return text
    try:
        ids = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list):
        raise Undecodable(f"its header {ALSO_TRACKING_IDS} is no JSON list")
    return ids
