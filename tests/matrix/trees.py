"""Trees: a distribution's suite with what the tests need, unpacked once into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

from outbox.testing.servers import debian, ladder
from tests.matrix.namespaces import CannotEnter, beside, inside
from tests.matrix.versions import TRIXIE, Tree, is_ubuntu

_DEBIAN_KEYS = "usr/share/keyrings/debian-archive-keyring.gpg"
_UBUNTU_KEYS = "usr/share/keyrings/ubuntu-archive-keyring.gpg"
_UNBUFFERED = "-o=Dpkg::Use-Pty=0"

# What the tree lacks may come from the other suite; what it has stays its own.
_PREFERENCES = "Package: *\nPin: release n={other}\nPin-Priority: 100\n"
_START_NOTHING = "#!/bin/sh\nexit 101\n"  # no service of a package starts
_NO_CLUSTER = "create_main_cluster = false\n"  # nor does PostgreSQL's package make a database of its own

# debootstrap's script of a distribution names the mirror in a call of this function.
_NAME_THE_MIRROR = 'default_mirror() { echo "$1"; exit; }; . "$0"'


def tree_of(wanted: Tree) -> Path:
    """The tree's folder, made the first time it is asked for: minutes, and about a gigabyte."""
    recipe = hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]
    return ladder.kept(f"tree-{wanted.suite}-{recipe}", partial(_make, wanted))


def _make(wanted: Tree, folder: Path) -> None:
    tools = _tools()
    script, mirror = _script(tools, wanted.suite), _mirror(tools, wanted.suite)
    options = ["--variant=minbase", f"--keyring={_keys(wanted.suite)}"]
    command = [str(tools / "usr/sbin/debootstrap"), *options, wanted.suite, str(folder), mirror, str(script)]
    if beside(command, {"DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap")}):
        raise CannotEnter(f"debootstrap could not unpack {wanted.suite}; its own text is above")
    _prepare(wanted, folder, tools)
    packages = [*wanted.packages, *(f"{name}/{wanted.other}" for name in wanted.of_other)]
    install = ["apt-get", "-q", "-y", _UNBUFFERED, "--no-install-recommends", "install", *packages]
    for step in (["apt-get", "-q", "update"], install, ["apt-get", "clean"]):
        if inside(folder, step):
            raise CannotEnter(f"apt could not install what the tests need in {wanted.suite}; its own text is above")


def _prepare(wanted: Tree, folder: Path, tools: Path) -> None:
    """The network's names, the sources of packages, and no service that starts by itself."""
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    _write(folder / "usr/sbin/policy-rc.d", _START_NOTHING).chmod(0o755)
    _write(folder / "etc/postgresql-common/createcluster.conf", _NO_CLUSTER)
    suites = [wanted.suite, *([wanted.other] if wanted.other else [])]
    _write(folder / "etc/apt/sources.list", "".join(_source(suite, folder, tools) for suite in suites))
    if wanted.other:
        _write(folder / "etc/apt/preferences.d/other", _PREFERENCES.format(other=wanted.other))


def _source(suite: str, folder: Path, tools: Path) -> str:
    """A suite's line in sources.list, and its keys in the tree."""
    keys = folder / "etc/apt/keys" / _keys(suite).name
    keys.parent.mkdir(exist_ok=True)
    shutil.copyfile(_keys(suite), keys)
    keys.chmod(0o644)
    parts = "main universe" if is_ubuntu(suite) else "main"
    # A mirror may be a snapshot, whose lists are signed but past their date.
    options = f"signed-by=/{keys.relative_to(folder)} check-valid-until=no"
    return f"deb [{options}] {_mirror(tools, suite)} {suite} {parts}\n"


def _tools() -> Path:
    """Where debootstrap is: on this machine, or unpacked in the cache."""
    if Path("/usr/share/debootstrap").exists():
        return Path("/")
    try:
        return ladder.kept("debootstrap", partial(debian.unpack, ["debootstrap"]))
    except debian.PackagesUnavailable as error:
        raise CannotEnter(f"debootstrap cannot be had: {error}") from error


def _script(tools: Path, suite: str) -> Path:
    # An older debootstrap does not know the newest suites by name; all have been made alike for years.
    return tools / "usr/share/debootstrap/scripts" / ("gutsy" if is_ubuntu(suite) else "sid")


def _keys(suite: str) -> Path:
    """The keys that sign a suite: Ubuntu's come from a package that Debian has signed."""
    keys = tree_of(TRIXIE) / _UBUNTU_KEYS if is_ubuntu(suite) else Path("/") / _DEBIAN_KEYS
    if not keys.exists():
        raise CannotEnter(f"{keys} is missing: install debian-archive-keyring")
    return keys


def _mirror(tools: Path, suite: str) -> str:
    """The mirror that debootstrap itself would take."""
    asked = ["/bin/sh", "-c", _NAME_THE_MIRROR, str(_script(tools, suite))]
    variables = {**os.environ, "ARCH": _architecture(), "SUITE": suite}
    named = subprocess.run(asked, env=variables, capture_output=True, text=True, check=False).stdout.strip()
    usual = re.search(r'^DEF_MIRROR="(\S+)"', (tools / "usr/sbin/debootstrap").read_text(), re.MULTILINE)
    if not named and usual is None:
        raise CannotEnter(f"debootstrap knows no mirror for {suite}")
    return named or (usual[1] if usual else "")


def _architecture() -> str:
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
