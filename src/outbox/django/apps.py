"""OutboxConfig: the app, whose `ready()` is the setup."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings

from outbox import setup
from outbox.django import database_url


class OutboxConfig(AppConfig):
    """Sets up `outbox.outbox` from the setting `OUTBOX`, options of `setup()`, and from `DATABASES`."""

    name = "outbox.django"
    label = "outbox"
    verbose_name = "Outbox"

    def ready(self) -> None:
        options: dict[str, Any] = dict(getattr(settings, "OUTBOX", {}))
        alias = options.pop("database", "default")
        if options.get("db_engine") is None and options.get("db_engine_url") is None:
            options["db_engine_url"] = database_url(settings.DATABASES[alias])
        setup(**options)
