"""Folders: what a server leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

LONG = 60.0  # seconds after which a test is lost


def wait_until_empty(folder: Path) -> None:
    deadline = time.monotonic() + LONG
    while any(folder.iterdir()):
        assert time.monotonic() < deadline, f"left behind: {list(folder.iterdir())}"
        time.sleep(0.01)
