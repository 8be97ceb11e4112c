"""Locks: whatever dev.py installs is known by its hash."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = (
    "requirements-test.lock",
    "requirements-sqlalchemy-2.0.lock",
    "requirements-docs.lock",
    "requirements-virtualenv.lock",
    "bench/requirements.txt",
)


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_of_a_lock_has_a_version_and_a_hash(lock: str) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / lock).read_text(), flags=re.MULTILINE).replace("\\\n", "")
    requirements = [line for line in text.splitlines() if line.strip()]
    assert requirements
    assert all(re.match(r"[\w.-]+(\[\w+\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line) for line in requirements)


def test_every_installation_asks_for_hashes_or_installs_nothing_but_the_project() -> None:
    installs = re.findall(r"self\._pip\((.*)\)|(?:install|hashed) = \[(.*)\]", (ROOT / "dev.py").read_text())
    assert len(installs) == 8
    for arguments in map("".join, installs):
        assert '"--require-hashes"' in arguments or '"--no-deps", "--no-build-isolation", "--editable"' in arguments


def installed_as_locked(block: str) -> bool:
    name, wanted = re.findall(r"^([\w.-]+)==([^\s;]+)", block)[0]
    try:
        return version(name) == wanted
    except PackageNotFoundError:  # of another system
        return True


def test_the_demo_installs_all_that_the_project_depends_on(dev: ModuleType) -> None:
    assert set(dev.DEMO) <= set(dev.locked())
    if not all(installed_as_locked(block) for name, block in dev.locked().items() if name in dev.DEMO):
        pytest.skip("other versions are installed than the lock names, and they may need other packages")
    needed, found = ["transactional-outbox", "hatchling", "editables"], set()
    while needed:
        name = needed.pop()
        try:
            requirements = requires(name) or []
        except PackageNotFoundError:  # of another system
            continue
        for requirement in requirements:
            wanted = re.match(r"[\w.-]+", requirement)
            if wanted is not None and "extra ==" not in requirement and "python_version <" not in requirement:
                dependency = re.sub(r"[-_.]+", "-", wanted[0]).lower()
                if dependency not in found:
                    found.add(dependency)
                    needed.append(dependency)
    assert found | {"hatchling", "editables", "greenlet"} <= set(dev.DEMO)
