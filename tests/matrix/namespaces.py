"""Namespaces: a command inside a tree, with mounts and processes that end together with it.

The mounts exist in a mount namespace of the command alone, and every process that it starts is in its process
namespace: when its first process ends, or this program does, the kernel ends the others and takes the mounts away.
Nothing has to be unmounted, and no path of this machine is mounted into a tree.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROGRAMS = ("unshare", "setpriv", "chroot", "mount")
_END_WITHIN = 30.0  # seconds for the kernel to end what a killed command left

# debootstrap has made the usual devices in /dev; a terminal and shared memory need file systems of their own.
_ENTER = """
set -e
root=$1
shift
mount -t proc proc "$root/proc"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
set +e
chroot "$root" "$@"
exit $?
"""

# The same without a root of its own: for the program that makes a tree.
_BESIDE = 'shift; "$@"; exit $?'

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


class CannotEnter(Exception):
    """This machine, or its user, cannot run anything in a tree; the text says why."""


def check() -> None:
    """Say what is missing before anything is downloaded."""
    if os.geteuid() != 0:
        raise CannotEnter("it runs inside a tree of another distribution, and only root may change into one")
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CannotEnter(f"{' and '.join(missing)} (of util-linux and coreutils) are not on this machine")


def inside(root: Path, command: Sequence[str], *, folder: str = "/", variables: Mapping[str, str] | None = None) -> int:
    """Run a command with the tree as its root; return its exit code."""
    script = 'cd "$1" && shift && exec "$@"'
    moved = ["/bin/sh", "-c", script, "sh", folder, *command]
    return _run(_ENTER, [str(root), *moved], {**_ENVIRONMENT, **(variables or {})})


def beside(command: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    """Run a command of this machine that mounts things: they are gone when it ends."""
    return _run(_BESIDE, ["", *command], {**os.environ, **(variables or {})})


def _run(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    # The last process of the namespace closes the other end of this pipe.
    last_one_gone, inherited = os.pipe()
    process = subprocess.Popen(
        # If we are killed, unshare is, and with it the first process of the namespace, and so all of them.
        [*("setpriv", "--pdeathsig", "KILL"), *_unshare(), "/bin/sh", "-c", script, "sh", *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is ours to hand on
        pass_fds=[inherited],
    )
    os.close(inherited)
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()
        _wait_for_the_last(last_one_gone)


def _unshare() -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL"]


def _wait_for_the_last(pipe: int) -> None:
    gone = select.poll()
    gone.register(pipe)
    if not gone.poll(_END_WITHIN * 1000):
        raise RuntimeError(f"processes in a tree still run after {_END_WITHIN:.0f} s")
    os.close(pipe)
