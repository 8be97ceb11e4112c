"""Tables: AMQP properties and header tables, cut into their parts, and the values in them. All of it is bounded."""

from __future__ import annotations

from struct import Struct
from typing import Any

from pamqp import decode

DEEPEST = 32  # levels of lists and tables in one header: the broker's own have two

SHORT, LONG, LONG_LONG = Struct(">H"), Struct(">I"), Struct(">q")

# Properties in the order in which they travel, each with its bit.
PROPERTIES = (
    ("content_type", 1 << 15),
    ("content_encoding", 1 << 14),
    ("headers", 1 << 13),
    ("delivery_mode", 1 << 12),
    ("priority", 1 << 11),
    ("correlation_id", 1 << 10),
    ("reply_to", 1 << 9),
    ("expiration", 1 << 8),
    ("message_id", 1 << 7),
    ("timestamp", 1 << 6),
    ("message_type", 1 << 5),
    ("user_id", 1 << 4),
    ("app_id", 1 << 3),
    ("cluster_id", 1 << 2),
)
OUR_FLAGS = SHORT.pack(1 << 15 | 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6)  # of the properties that our messages have
EXPIRING_FLAGS = SHORT.pack(1 << 15 | 1 << 13 | 1 << 12 | 1 << 8 | 1 << 7 | 1 << 6)  # of those with a time to live

_SIZES = {"delivery_mode": 1, "priority": 1, "timestamp": 8}
_FIXED_SIZES = {
    **dict.fromkeys(b"V\x00", 0),
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"sUu", 2),
    **dict.fromkeys(b"Iif", 4),
    b"D"[0]: 5,
    **dict.fromkeys(b"lLdT", 8),
}
_LENGTHS = frozenset(b"SxAF")  # these begin with their length
_TEXT, _BYTES, _LIST, _TABLE, LONG_NUMBER = b"SxAFl"

Table = dict[str, bytes]  # names with values as they travel: one byte for the type, then the value


def split_properties(data: bytes) -> Table:
    """Each property as it travels, from the flags on."""
    if data.startswith(OUR_FLAGS):
        return _split_ours(data)
    flags = SHORT.unpack_from(data)[0]
    if flags & 1:
        raise ValueError("there are more properties than AMQP 0-9-1 has")
    found: Table = {}
    start = 2
    for name, bit in PROPERTIES:
        if not flags & bit:
            continue
        if name == "headers":
            end = start + 4 + LONG.unpack_from(data, start)[0]
        else:
            end = start + (_SIZES.get(name) or 1 + data[start])
        if end > len(data):
            raise ValueError(f"{name} is cut off")
        found[name] = data[start:end]
        start = end
    return found


def _split_ours(data: bytes) -> Table:
    """The same for messages of our own, which all have the same properties."""
    headers = 3 + data[2]
    mode = headers + 4 + LONG.unpack_from(data, headers)[0]
    timestamp = mode + 2 + data[mode + 1]
    if timestamp + 8 > len(data):
        raise ValueError("they are cut off")
    return {
        "content_type": data[2:headers],
        "headers": data[headers:mode],
        "delivery_mode": data[mode : mode + 1],
        "message_id": data[mode + 1 : timestamp],
        "timestamp": data[timestamp : timestamp + 8],
    }


def split_table(data: bytes) -> Table:
    """Each entry of a table that begins with its length."""
    found: Table = {}
    start, end = 4, len(data)
    while start < end:
        value = start + 1 + data[start]
        name = data[start + 1 : value].decode(errors="surrogateescape")  # so that it can be carried on
        kind = data[value]
        size = _FIXED_SIZES.get(kind)
        if size is None:
            if kind not in _LENGTHS:
                raise ValueError(f"the header {name!r} has the unknown type {chr(kind)!r}")
            size = 4 + LONG.unpack_from(data, value + 1)[0]
        start = value + 1 + size
        if start > end:
            raise ValueError(f"the header {name!r} is cut off")
        found[name] = data[value:start]
    return found


def value_of(raw: bytes) -> Any:
    """An entry's value. Raises what the data makes it raise, and never by recursion."""
    if raw[0] == _TEXT:
        return raw[5:].decode(errors="replace")
    if raw[0] == LONG_NUMBER:
        return LONG_LONG.unpack_from(raw, 1)[0]
    return _value(raw, 0, len(raw), DEEPEST)


def _value(data: bytes, start: int, end: int, levels: int) -> Any:
    """What stands between two places, which `_end` has found."""
    kind = data[start]
    if kind == _TEXT:
        return data[start + 5 : end].decode(errors="replace")
    if kind == _BYTES:
        return data[start + 5 : end]
    if kind not in (_LIST, _TABLE):
        return decode.TABLE_MAPPING[data[start : start + 1]](data[start + 1 : end])[1]
    if not levels:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return (_list if kind == _LIST else _table)(data, start + 5, end, levels - 1)


def _list(data: bytes, start: int, end: int, levels: int) -> list[Any]:
    found = []
    while start < end:
        stop = _end(data, start, end)
        found.append(_value(data, start, stop, levels))
        start = stop
    return found


def _table(data: bytes, start: int, end: int, levels: int) -> dict[str, Any]:
    found = {}
    while start < end:
        value = start + 1 + data[start]
        name = data[start + 1 : value].decode()
        start = _end(data, value, end)
        found[name] = _value(data, value, start, levels)
    return found


def _end(data: bytes, start: int, end: int) -> int:
    """Where the value that begins here ends."""
    kind = data[start]
    size = _FIXED_SIZES.get(kind)
    if size is None:
        if kind not in _LENGTHS:
            raise ValueError(f"it holds the unknown type {chr(kind)!r}")
        size = 4 + LONG.unpack_from(data, start + 1)[0]
    stop: int = start + 1 + size
    if stop > end:
        raise ValueError("it holds more than fits into it")
    return stop
