"""Disk: a small file system of its own, which can be full."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from outbox.testing.servers.programs import account

_CHUNK = 1024 * 1024


class Disk:
    """A tmpfs of so many bytes, for as long as the block lasts; `reason` says why there is none."""

    # A shell that outlives us for a moment, so that a rig that is killed leaves no mount behind.
    _GUARDIAN = 'read -r line; umount -l "$1"; rmdir "$1"'

    def __init__(self, size: int) -> None:
        self._size = size
        self.reason = ""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="outbox-chaos-disk-"))
        options = f"size={self._size},mode=755"
        mount = ["mount", "-t", "tmpfs", "-o", options, "outbox-chaos", str(self.folder)]
        try:
            mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
            if mounted.returncode:
                self.reason = mounted.stderr.strip().splitlines()[0].replace(str(self.folder), "a folder")
        except OSError as error:
            self.reason = str(error)
        script = self._GUARDIAN if not self.reason else 'read -r line; rm -rf "$1"'
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", script, "guardian", str(self.folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        account().owns(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        self._guardian.wait()

    def fill(self) -> int:
        """Take every byte that is left; how many there were."""
        taken, part = 0, _CHUNK
        with self._ballast.open("wb", buffering=0) as ballast:
            while part:
                try:
                    os.posix_fallocate(ballast.fileno(), taken, part)
                    taken += part
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    left = os.statvfs(self.folder)  # the database, too, may have taken some meanwhile
                    part = min(part // 2, left.f_bavail * left.f_frsize)
        return taken

    def free(self) -> None:
        """Give them back."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"
