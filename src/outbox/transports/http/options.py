"""HttpOptions: the settings that the HTTP transport takes."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.webhooks import Secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """By their names in `setup()`, where each is described."""

    source: str = "/outbox"
    webhook_secrets: Secrets | None = None
