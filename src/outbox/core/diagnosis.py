"""Diagnosis: what a doctor finds, and the facts it is found from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # it works, and may not for long
    ERROR = "error"  # messages do not get where they should


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a database says of itself, without a look at the messages in it."""

    server: str  # its name and version
    skew: timedelta  # by how much, at least, its clock is ahead of this process's; negative if it is behind
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """What lies for one destination, and who holds it."""

    queue: str | None  # None: not routed yet
    due: int  # nobody holds them and they could be claimed now
    overdue: timedelta | None  # for how long the oldest of them has been due
    leased: int  # held by somebody
    next_end: timedelta | None  # when the first of these leases ends unless it is renewed
    expired: int  # their lease ran out, and nobody has claimed them since
    expired_for: timedelta | None  # since when, at most
