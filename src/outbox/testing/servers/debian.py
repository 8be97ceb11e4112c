"""Debian packages: fetched and unpacked into a folder, without root and without installing anything.

Standard library only, and nothing of this package: `dev.py` loads this file before anything is installed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INSTALLED = Path("/var/lib/dpkg/status")  # dpkg's record of what this machine already has


class PackagesUnavailable(Exception):
    """The packages cannot be had on this machine; the text says why."""


def unpack(packages: Sequence[str], folder: Path, *, installed: Path = INSTALLED) -> None:
    """Unpack the packages into the folder, together with everything they need that is not installed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise PackagesUnavailable("apt-get and dpkg are not on this machine")
    apt = Apt(folder / ".apt", installed)
    try:
        for archive in apt.fetch(packages):
            _run(["dpkg", "-x", str(archive), str(folder)], cwd=folder)
    finally:
        shutil.rmtree(apt.folder, ignore_errors=True)
    _keep_links_inside(folder)


def libraries(folder: Path) -> tuple[Path, ...]:
    """The folders in which unpacked programs find their shared libraries."""
    return tuple(sorted([*folder.glob("usr/lib/*-linux-gnu*"), *folder.glob("lib/*-linux-gnu*")]))


class Apt:
    """apt with lists and a cache of its own, so that it needs neither root nor the machine's lock."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.folder = folder
        self._archives = folder / "archives"
        for needed in (folder / "state/lists/partial", folder / "cache/archives/partial", self._archives):
            needed.mkdir(parents=True)
        options = {
            "Dir::State": f"{folder}/state",
            "Dir::State::status": f"{installed}",
            "Dir::Cache": f"{folder}/cache",
            "Debug::NoLocking": "1",
            "APT::Sandbox::User": "",  # the user _apt may not write into a private folder
            "Acquire::Languages": "none",
        }
        self._options = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def fetch(self, packages: Sequence[str]) -> list[Path]:
        """The archives of the packages and of what they need."""
        self._get("update")
        plan = self._get("--simulate", "--no-install-recommends", "install", *packages)
        # A line of the plan: Inst libpq5 (15.18-0+deb12u1 Debian:12.15/oldstable [amd64])
        missing = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", plan, re.MULTILINE)
        if not missing:
            raise PackagesUnavailable(f"already installed: {', '.join(packages)}")
        self._get("download", *(f"{name}={version}" for name, version in missing))
        return sorted(self._archives.glob("*.deb"))

    def _get(self, *arguments: str) -> str:
        return _run(["apt-get", "-q", *self._options, *arguments], cwd=self._archives)


def _keep_links_inside(folder: Path) -> None:
    # Absolute links mean the root of a machine that has the package installed; here that root is the folder.
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        target = link.readlink()
        if target.is_absolute():
            link.unlink()
            link.symlink_to(os.path.relpath(folder / target.relative_to("/"), link.parent))


def _run(command: Sequence[str], *, cwd: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise PackagesUnavailable(f"{command[0]} failed: {' '.join(last)}")
    return done.stdout
