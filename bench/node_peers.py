"""Node's peers: programs of another language that do the same work, where this machine has node and npm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "node"
FOLDER = Path(__file__).parents[1] / "build/node-peers"
_WANTED = ("package.json", "package-lock.json")


class NodeMissing(Exception):
    """The peer cannot be run here; the text says why."""


def installed() -> dict[str, str]:
    """The environment in which node finds what bench/node/package-lock.json names; installed the first time."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NodeMissing("node and npm are not on this machine")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not all(_is_same(name) for name in _WANTED) or not (FOLDER / "node_modules").exists():
        for name in _WANTED:
            shutil.copyfile(SOURCES / name, FOLDER / name)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            shutil.rmtree(FOLDER)
            raise NodeMissing(f"npm could not install it: {done.stderr.strip()[-300:]}")
    return {"NODE_PATH": str(FOLDER / "node_modules")}


def _is_same(name: str) -> bool:
    file = FOLDER / name
    return file.exists() and file.read_bytes() == (SOURCES / name).read_bytes()
