"""Zones: a time zone that breaks the rules."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo


class Broken(tzinfo):
    """A time zone that answers nonsense."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(days=2)

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> str:
        return "nonsense"
