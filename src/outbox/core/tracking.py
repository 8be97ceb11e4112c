"""Tracking: the ids that lead from an entry point to the message at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import quote
from uuid import UUID

from outbox.core.binding import LONGEST_KEY

MOST_IDS = 64  # brokers and HTTP servers limit what a message carries beside its body: the first id, and the last 63

LARGEST_IDS = 4096  # bytes of those that led here, as the header of a CloudEvent has them; the same reason

_tracking_ids: ContextVar[tuple[str, ...]] = ContextVar("outbox_tracking_ids", default=())


def get_tracking_ids() -> tuple[str, ...]:
    """The ids of the messages that led here, oldest first: of more than 64 the first and the last 63."""
    return _tracking_ids.get()


@contextmanager
def tracking() -> Iterator[tuple[str, ...]]:
    """Give what is emitted in this block a common first id, one for the entry point itself."""
    tracking_ids = next_tracking_ids()
    token = _tracking_ids.set(tracking_ids)
    try:
        yield tracking_ids
    finally:
        _tracking_ids.reset(token)


def follow(tracking_ids: tuple[str, ...]) -> None:
    """Let the rest of this task be what follows from the message with these tracking ids.

    Another program may have written them. One that `emit` would not take is left out: it would make every message that
    follows one that no broker, or no next service, takes.
    """
    tracking_ids = kept(tracking_ids)
    for id in tracking_ids:
        if not id.isascii() or not id.isprintable() or not 0 < len(id) <= LONGEST_KEY:
            tracking_ids = tuple(filter(_travels, tracking_ids))
            break
    text = ",".join(tracking_ids)
    if 5 * len(text) > LARGEST_IDS or not text.isascii():  # a character of ASCII takes five at most
        tracking_ids = _fitting(tracking_ids)
    _tracking_ids.set(tracking_ids)


def next_tracking_ids() -> tuple[str, ...]:
    """The tracking ids of what is made here: those that led here, and a new one."""
    return kept((*get_tracking_ids(), new_id()))


def kept(tracking_ids: tuple[str, ...]) -> tuple[str, ...]:
    """Of many ids those that are kept: the first and the last ones."""
    if len(tracking_ids) <= MOST_IDS:
        return tracking_ids
    return (tracking_ids[0], *tracking_ids[1 - MOST_IDS :])


def _fitting(tracking_ids: tuple[str, ...]) -> tuple[str, ...]:
    """The first one, and of the last ones as many as fit."""
    if _size(",".join(tracking_ids)) <= LARGEST_IDS:
        return tracking_ids
    first, *others = tracking_ids
    room = LARGEST_IDS - _size(first)
    last: list[str] = []
    for id in reversed(others):
        room -= _size(id) + 1
        if room < 0:
            break
        last.append(id)
    return (first, *reversed(last))


def _size(ids: str) -> int:
    """In a header of a binary CloudEvent, where the percent signs that quote an id are quoted again."""
    return len(quote(quote(ids, safe=","), safe=","))


def _travels(id: str) -> bool:
    """Whether an id is what `check_message_ids` takes."""
    try:
        size = len(id.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= LONGEST_KEY and not any(character < " " or character == "\x7f" for character in id)


def new_id() -> str:
    """A version 7 UUID: random, and in the order of time, which keeps indexes over ids small and warm."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76 | (random >> 68 & 0xFFF) << 64 | 0b10 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    return str(UUID(int=value))
