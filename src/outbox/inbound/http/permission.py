"""Permission: what a sender is told that asks before it sends, as CloudEvents' "HTTP 1.1 Web Hooks" has it.

Some send nothing to a URL that does not answer this question. It protects others from them: a receiver that can answer
expects events. It authenticates no sender, so every origin is told yes, and each request is checked as any other.
"""

from __future__ import annotations

import re
from typing import Final

from outbox.inbound.http.response import Declined, Response, Scope

ORIGIN: Final = b"webhook-request-origin"

_NAME = re.compile(r"[A-Za-z0-9._:\-]{1,255}")  # a DNS name, perhaps with a port


def permission(scope: Scope) -> Response | None:
    """The response to a request that asks for permission to send; None to any other. Raises Declined."""
    if scope["method"] != "OPTIONS":
        return None
    origins = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == ORIGIN]
    if not origins:
        return None
    if len(origins) > 1 or not _NAME.fullmatch(origins[0]):
        raise Declined(400, f"{ORIGIN.decode()} is the name of one host: send for example events.example.com")
    # No rate is agreed: what comes faster than it can be stored is told 503 and when to come again.
    return Response(200, headers={"allow": "POST", "webhook-allowed-origin": origins[0], "webhook-allowed-rate": "*"})
