"""Payload: what every library is given to carry."""

from __future__ import annotations

import json

SIZE = 256  # bytes, as JSON


def body(number: int) -> dict[str, int | str]:
    """The body with this number, of the same size as every other one."""
    empty: dict[str, int | str] = {"number": number, "padding": ""}
    return empty | {"padding": "x" * (SIZE - len(json.dumps(empty)))}
