"""Ladder: the places a server's programs may come from, tried in order.

A rung answers with programs, or tells why it has none; nothing is skipped silently.
"""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from outbox.core.errors import OutboxError
from outbox.testing.servers import debian
from outbox.testing.servers.programs import Programs, account

DOWNLOADS = "OUTBOX_TEST_DOWNLOADS"  # 1: what this machine lacks may be downloaded


class ServerMissing(OutboxError):
    """No rung of the ladder has the server; the text tells what was tried and what to install."""


@dataclass(frozen=True)
class Absent:
    """A rung that does not hold, and why."""

    reason: str


Rung = Callable[[], Programs | Absent]


def find(server: str, rungs: Iterable[Rung], advice: str) -> Programs:
    """The programs on the first rung that has them."""
    tried = [] if os.name == "posix" else ["  - private servers need a POSIX system"]
    for rung in rungs if os.name == "posix" else ():
        match rung():
            case Programs() as programs:
                return programs
            case Absent(reason):
                tried.append(f"  - {reason}")
    raise ServerMissing("\n".join([f"no {server} for the tests:", *tried, advice]))


def installed(*names: str, folders: str) -> Rung:
    """Programs of this machine: in the newest folder of a pattern, else on the PATH."""

    def rung() -> Programs | Absent:
        for folder in [*_newest_first(Path("/"), folders.lstrip("/")), *_search_path()]:
            if all(account().may_run(folder / name) for name in names):
                return Programs(folder, f"programs installed in {folder}")
        return Absent(f"installed: neither {folders} nor the PATH has {' and '.join(names)}")

    return rung


def from_wheel(distribution: str, *names: str, folders: str) -> Rung:
    """Programs that a wheel carries, in the newest folder of a pattern inside its package."""

    def rung() -> Programs | Absent:
        spec = find_spec(distribution.replace("-", "_"))
        for package in (spec and spec.submodule_search_locations) or ():
            for folder in _newest_first(Path(package), folders):
                opened = _opened(folder, Path(package), distribution, names[0])
                if all(account().may_run(opened / name) for name in names):
                    return Programs(opened, f"programs of the wheel {distribution} ({folder.parent.name})")
        return Absent(f"wheel: {distribution} is not installed or has no {' and '.join(names)}")

    return rung


def from_debian(*packages: str, folders: str) -> Rung:
    """Programs of Debian packages, fetched once if that is allowed, and unpacked into a cache; none is installed."""

    def rung() -> Programs | Absent:
        try:
            root = kept(f"debian-{_release()}-{'-'.join(packages)}", partial(_unpack, packages))
        except (debian.PackagesUnavailable, OSError) as error:
            return Absent(f"Debian packages: {error}")
        for folder in _newest_first(root, folders):
            return Programs(folder, f"Debian packages unpacked in {root}", debian.libraries(root))
        return Absent(f"Debian packages: {', '.join(packages)} unpacked in {root} have no {folders}")

    return rung


def _unpack(packages: Sequence[str], folder: Path) -> None:
    if os.environ.get(DOWNLOADS) != "1":
        named = ", ".join(packages)
        raise debian.PackagesUnavailable(f"{named} would have to be downloaded: set {DOWNLOADS}=1 to allow that")
    debian.unpack(packages, folder)


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache, made the first time it is asked for."""
    folder = _cache() / name
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as draft:
            made = Path(draft) / name
            made.mkdir()
            made.chmod(0o755)
            make(made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster, and its folder is as good
                if not folder.exists():
                    raise
    return folder


def _opened(folder: Path, package: Path, distribution: str, name: str) -> Path:
    """The folder or, where our account may not enter it (a home of mode 700), its copy in the cache."""
    if account().may_run(folder / name) or not os.access(folder / name, os.X_OK):
        return folder

    def copy(to: Path) -> None:
        # The programs look for their libraries in a sibling folder, so it has to come along.
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.exists():
                shutil.copytree(source, to / source.name, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", str(to)], check=True)

    return kept(f"wheel-{distribution}-{version(distribution)}", copy) / folder.relative_to(package.parent)


def _search_path() -> Iterator[Path]:
    for folder in [*os.get_exec_path(), "/usr/local/sbin", "/usr/sbin", "/sbin"]:
        if folder:
            yield Path(folder)


def _newest_first(root: Path, pattern: str) -> list[Path]:
    def numbers(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", str(path.relative_to(root)))]

    return sorted(root.glob(pattern), key=numbers, reverse=True)


def _release() -> str:
    """This machine's release, since a package of another one would not find its libraries."""
    release = platform.freedesktop_os_release()
    return f"{release['ID']}-{release.get('VERSION_ID', 'rolling')}-{platform.machine()}"


def _cache() -> Path:
    """OUTBOX_TEST_CACHE, the user's cache, or a folder of the user's own among the temporary ones."""
    chosen = os.environ.get("OUTBOX_TEST_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    temporary = Path(tempfile.gettempdir()) / f"outbox-testing-{os.geteuid()}"
    if os.geteuid() == 0:
        home = Path("/var/cache")  # root's own home is closed to the account that servers run as
    folders = [Path(chosen)] if chosen else [home / "outbox-testing", temporary]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        except OSError:
            continue
        # What lies there will be run, so a folder that another user made will not do.
        if folder.stat().st_uid == os.geteuid():
            return folder
    named = " nor ".join(map(str, folders))
    raise ServerMissing(f"cannot keep programs in {named}: set OUTBOX_TEST_CACHE to a folder of yours")
