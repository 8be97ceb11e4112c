"""Specimens: messages for the tests of the checker."""

from __future__ import annotations

from tests.chaos.history import Emitted


def emitted(id: str, fate: str = "fine", routing_key: str = "order.placed") -> Emitted:
    body = f'{{"fate": "{fate}"}}'.encode()
    return Emitted(id, routing_key, body, {"tenant": "acme"}, "key", "application/json", fate)
