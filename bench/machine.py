"""Machine: what the numbers came from, without its name or any path on it."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

from bench.database import Database


async def machine(database: Database) -> str:
    """One paragraph."""
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d}: {_processor()}, {os.cpu_count()} cores shared by the programs and "
        f"the database, {_memory()} GiB of memory, Linux {platform.release()}, PostgreSQL {await database.version()} "
        f"with fsync, Python {platform.python_version()}."
    )


def _processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _memory() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
