#!/usr/bin/env python3
"""Commands for working on this project, on a machine that has nothing but Python.

    python3 dev.py demo                      show the library at work, on SQLite
    python3 dev.py test                      all that must hold: the linters, the documentation site, every test on
                                             real servers, and those of the stores again on the older SQLAlchemy
    python3 dev.py test tests/unit -k name   pytest alone, with these arguments
    python3 dev.py check                     between two changes: the linters, and the tests that need no server, of the
                                             parts alone and of what every store and transport promises
    python3 dev.py lint                      the linters alone
    python3 dev.py docs                      build the documentation site into build/site, and check its links
    python3 dev.py docs --serve              and show it at http://127.0.0.1:8000, anew after each change
    python3 dev.py bench                     measure how fast it is, beside its limits and its peers
    python3 dev.py bench drain emit          these parts alone
    python3 dev.py chaos --seed 1            minutes of crashes and cuts, on real servers; no promise may break
    python3 dev.py chaos --database standby  the same with one kind of database, broker or failover: --help names them
    python3 dev.py mutants                   break the library in every way that is written down, and see a test fail
    python3 dev.py mutants name other-name   these mutants alone
    python3 dev.py matrix                    run the tests on every version of Python, the servers and the dependencies
    python3 dev.py matrix rabbitmq-4.3       this version alone

The first run makes the virtual environment .venv and installs into it; later runs need no network.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
LOCK = ROOT / "requirements-test.lock"
PEERS = ROOT / "bench/requirements.txt"
SITE = ROOT / "requirements-docs.lock"
OLDER_SQLALCHEMY = ROOT / "requirements-sqlalchemy-2.0.lock"
VIRTUALENV = ROOT / "requirements-virtualenv.lock"
OLDEST_PYTHON = (3, 11)

# The pip to fetch where a machine has none; the hash makes it safe to take it from any index.
PIP_VERSION = "26.3"
PIP_WHEEL = f"pip-{PIP_VERSION}-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"

# What the demo needs of the lock: the project's dependencies with theirs, and what builds the project.
DEMO = (
    *("aiosqlite", "annotated-doc", "annotated-types", "colorama", "editables", "greenlet", "hatchling"),
    *("markdown-it-py", "mdurl", "packaging", "pathspec", "pluggy", "pydantic", "pydantic-core"),
    *("pygments", "rich", "shellingham", "sqlalchemy", "tomlkit", "trove-classifiers", "typer"),
    *("typing-extensions", "typing-inspection"),
)

LINTERS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"],
}
PYTEST = ["-m", "pytest"]
FAILOVER = "tests/chaos/test_failover_slots.py"  # minutes; `matrix` runs it on each PostgreSQL
BUILD_SITE = ["-m", "mkdocs", "build", "--strict"]  # with --quiet no warning would count
SERVE_SITE = ["-m", "mkdocs", "serve", "--dev-addr", "127.0.0.1:8000"]
# Most tests wait for something: four of them can, on two cores. In the order of tests/conftest.py: long files first.
SIDE_BY_SIDE = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
# Where one file has nearly all of the tests, they are dealt out one by one.
ONE_BY_ONE = ["-n", "3", "--dist", "worksteal"]
# What tells most in the shortest time.
WITHOUT_SERVERS = ["tests/unit", "tests/contract", "--no-servers", "-q", "-n", "2", "--dist", "worksteal"]
# An older SQLAlchemy is met on one driver of PostgreSQL: what the databases differ in is not SQLAlchemy's.
ON_OLDER_SQLALCHEMY = [
    *("tests/contract/test_stores.py", "tests/walk/test_joined_sessions.py"),
    *("-k", "asyncpg"),
]


def main(arguments: list[str]) -> int:
    commands = {
        "demo": demo,
        "test": test,
        "check": check,
        "lint": lint,
        "docs": docs,
        "bench": bench,
        "chaos": chaos,
        "mutants": mutants,
        "matrix": matrix,
    }
    if not arguments or arguments[0] not in commands:
        print(__doc__.strip())
        return 0 if arguments in (["-h"], ["--help"], ["help"]) else 2
    use_a_new_enough_python()
    os.chdir(ROOT)
    return commands[arguments[0]](arguments[1:])


def demo(arguments: list[str]) -> int:
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_demo()
    return run([environment.python, "-m", "outbox", "demo", *arguments])


def test(arguments: list[str]) -> int:
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    if arguments:
        return run([environment.python, *PYTEST, *arguments])
    first = environment.older_sqlalchemy().relative_to(ROOT).as_posix()
    older = [*ONE_BY_ONE, "--sqlalchemy", "2.0", "-o", f"pythonpath={first}", *ON_OLDER_SQLALCHEMY]
    everything = [*PYTEST, *SIDE_BY_SIDE, f"--ignore={FAILOVER}"]
    site = site_environment()
    return run_all(
        {
            **environment.commands(LINTERS),
            **site.commands({"site": BUILD_SITE}),
            **environment.commands({"pytest": everything, "sqlalchemy 2.0": [*PYTEST, *older]}),
        }
    )


def check(arguments: list[str]) -> int:
    if arguments:
        stop(f"check takes no arguments, but was given: {' '.join(arguments)}")
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    return run_all(environment.commands({**LINTERS, "pytest": [*PYTEST, *WITHOUT_SERVERS]}))


def lint(arguments: list[str]) -> int:
    if arguments:
        stop(f"lint takes no arguments, but was given: {' '.join(arguments)}")
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    return run_all(environment.commands(LINTERS))


def docs(arguments: list[str]) -> int:
    if arguments not in ([], ["--serve"]):
        stop(f"docs takes --serve or nothing, but was given: {' '.join(arguments)}")
    site = site_environment()
    if arguments:
        return run([site.python, *SERVE_SITE])
    code = run([site.python, *BUILD_SITE])
    if code == 0:
        say("the site is in build/site: open build/site/index.html, or run this with --serve")
    return code


def site_environment() -> Environment:
    """An environment of its own: what builds the site weighs more than the tests' other tools together need to."""
    environment = Environment(ROOT / ".venv-docs")
    environment.prepare_for_docs()
    return environment


def bench(arguments: list[str]) -> int:
    environment, peers = Environment(ROOT / ".venv"), Environment(ROOT / ".venv-peers")
    environment.prepare_for_tests()
    peers.prepare_for_peers()
    return run([environment.python, "-m", "bench", "--peers", peers.python, *arguments])


def chaos(arguments: list[str]) -> int:
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    return run([environment.python, "-m", "tests.chaos", *arguments])


def mutants(arguments: list[str]) -> int:
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    return run([environment.python, "-m", "tests.mutants", *arguments])


def matrix(arguments: list[str]) -> int:
    environment = Environment(ROOT / ".venv")
    environment.prepare_for_tests()
    return run([environment.python, "-m", "tests.matrix", *arguments])


def run_all(steps: dict[str, list[str]]) -> int:
    """Run every step, whatever became of the ones before it, and sum up at the end."""
    summary, failed = [], 0
    for name, command in steps.items():
        say(f"\n=== {name} ===")
        begun = time.monotonic()
        code = run(command)
        took = f"{time.monotonic() - begun:.1f} s"
        say(f"--- {name}: {'ok' if code == 0 else f'failed with code {code}'}, {took}")
        summary.append(f"  {'ok' if code == 0 else 'FAILED':8}{name:16}{took:>8}")
        failed += code != 0
    say("\n" + "\n".join(["summary", *summary]))
    return 1 if failed else 0


class Environment:
    """The virtual environment, and the notes in it that say what was installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))

    def prepare_for_tests(self) -> None:
        """Have everything of the lock, and the project itself, editable."""
        self._make()
        self._once("tests", LOCK.read_bytes(), self._install_lock)
        self._once("project", self._project(), self._install_project)

    def commands(self, steps: dict[str, list[str]]) -> dict[str, list[str]]:
        """The same steps, run by this environment's Python."""
        return {name: [self.python, *arguments] for name, arguments in steps.items()}

    def older_sqlalchemy(self) -> Path:
        """A folder that hides the newest SQLAlchemy from whoever has it first on the path."""
        folder = self.folder / "sqlalchemy-2.0"

        def install() -> None:
            say(f"installing what {OLDER_SQLALCHEMY.name} lays over it")
            shutil.rmtree(folder, ignore_errors=True)
            self._pip("--require-hashes", "--no-deps", "--target", str(folder), "--requirement", str(OLDER_SQLALCHEMY))

        self._once("sqlalchemy-2.0", OLDER_SQLALCHEMY.read_bytes(), install)
        return folder

    def prepare_for_demo(self) -> None:
        """Have the project and what it depends on; what the tests installed will do."""
        self._make()
        if self._noted("tests") == self._fingerprint(LOCK.read_bytes()):
            self._once("project", self._project(), self._install_project)
        else:
            self._once("demo", self._project() + LOCK.read_bytes(), self._install_project_and_dependencies)

    def prepare_for_peers(self) -> None:
        """Have the libraries that the benchmarks compare with, which may not agree with ours on a version."""
        self._make()
        self._once("peers", PEERS.read_bytes(), self._install_peers)

    def prepare_for_docs(self) -> None:
        """Have what builds the documentation site. It reads the project's sources and does not import them."""
        self._make()
        self._once("docs", SITE.read_bytes(), self._install_site)

    def _make(self) -> None:
        if self._works():
            return
        say(f"making the virtual environment {self.folder.name} with Python {sys.version.split()[0]}")
        for way in (venv, venv_without_pip, virtualenv):
            shutil.rmtree(self.folder, ignore_errors=True)
            if way(self) and self._works():
                return
        stop(
            "cannot make a virtual environment. Install the venv module (Debian, Ubuntu: apt-get install "
            "python3-venv) or virtualenv, or connect to a network, and run this again"
        )

    def _works(self) -> bool:
        # Programs in an environment hold its path, so one that was moved or copied is made anew.
        moved = self._noted("made") not in ("", str(self.folder))
        if moved or not Path(self.python).exists() or quietly([self.python, "-c", "import pip"]):
            return False
        self._note("made", str(self.folder))
        return True

    def _install_lock(self) -> None:
        say(f"installing what the tests need from {LOCK.name}")
        self._pip("--require-hashes", "--requirement", str(LOCK))

    def _install_peers(self) -> None:
        say(f"installing the peers from {PEERS.relative_to(ROOT)}")
        # The list is whole. An older pip would choose anew what a peer asks for with an extra.
        self._pip("--require-hashes", "--no-deps", "--requirement", str(PEERS))

    def _install_site(self) -> None:
        say(f"installing what builds the site from {SITE.name}")
        self._pip("--require-hashes", "--no-deps", "--requirement", str(SITE))

    def _install_project(self) -> None:
        say("installing the project, editable")
        # The lock has the build tools, so nothing need be fetched for an isolated build.
        self._pip("--no-deps", "--no-build-isolation", "--editable", ".")

    def _install_project_and_dependencies(self) -> None:
        say("installing the project and what it depends on")
        needed = self.folder / "demo.lock"
        needed.write_text("".join(block for name, block in locked().items() if name in DEMO))
        self._pip("--require-hashes", "--no-deps", "--requirement", str(needed))
        self._install_project()

    def _pip(self, *arguments: str) -> None:
        begun = time.monotonic()
        # Twice quiet: errors are shown, hints about newer versions of pip are not.
        if run([self.python, "-m", "pip", "install", "--quiet", "--quiet", *arguments]):
            stop("pip could not install; its words are above. The first run needs a network")
        say(f"installed in {time.monotonic() - begun:.0f} s")

    def _once(self, name: str, content: bytes, install: Callable[[], None]) -> None:
        """Install unless the note says that exactly this was installed before."""
        if self._noted(name) != self._fingerprint(content):
            install()
            self._note(name, self._fingerprint(content))

    def _project(self) -> bytes:
        return (ROOT / "pyproject.toml").read_bytes()

    def _fingerprint(self, content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    def _noted(self, name: str) -> str:
        note = self.folder / f"installed-{name}"
        return note.read_text() if note.exists() else ""

    def _note(self, name: str, text: str) -> None:
        (self.folder / f"installed-{name}").write_text(text)


def locked() -> dict[str, str]:
    """The requirements of the lock by their names, each with its hashes."""
    blocks = re.findall(r"^([\w.-]+)(==[^\n]+\n(?: +--hash=[^\n]+\n?)+)", LOCK.read_text(), re.MULTILINE)
    return {name: name + rest for name, rest in blocks}


# Three ways to make an environment, from the usual one to the one that needs nothing of the machine.


def venv(environment: Environment) -> bool:
    return quietly([sys.executable, "-m", "venv", str(environment.folder)]) == 0


def venv_without_pip(environment: Environment) -> bool:
    """For a Python without ensurepip, as Debian's is before python3-venv is installed."""
    if quietly([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)]):
        return False
    say("this Python has no ensurepip, so pip has to come from elsewhere")
    with tempfile.TemporaryDirectory() as folder:
        return any(
            quietly([environment.python, f"{wheel}/pip", "install", "--no-index", str(wheel)]) == 0
            for wheel in pip_wheels(Path(folder))
        )


def virtualenv(environment: Environment) -> bool:
    """For a Python whose venv module is missing or broken."""
    make = [sys.executable, "-m", "virtualenv", str(environment.folder)]
    if quietly(make) == 0:
        return True
    say("the venv module does not do here, so virtualenv has to come from elsewhere")
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "tools"
        # A target of our own is no part of the system, hence no business of PEP 668.
        install = ["install", "--target", str(tools), "--require-hashes", "--requirement", str(VIRTUALENV)]
        return any(
            quietly([sys.executable, f"{wheel}/pip", *install]) == 0 and quietly(make, PYTHONPATH=str(tools)) == 0
            for wheel in pip_wheels(Path(folder))
        )


def pip_wheels(folder: Path) -> Iterator[Path]:
    """Wheels of pip, which run as they are, from wherever one can be had."""
    for source in (wheels_of_this_machine, wheels_by_pip, wheels_of_the_index, wheels_of_debian):
        for wheel in source(folder):
            say(f"taking pip from {wheel.name} ({source.__name__.replace('_', ' ')})")
            yield wheel


def wheels_of_this_machine(_: Path) -> list[Path]:
    return sorted(Path("/usr/share/python-wheels").glob("pip-*.whl"))


def wheels_by_pip(folder: Path) -> list[Path]:
    wanted = folder / "pip.txt"
    wanted.write_text(f"pip=={PIP_VERSION} --hash=sha256:{PIP_SHA256}\n")
    hashed = ["--require-hashes", "--no-deps", "--requirement", str(wanted)]
    quietly([sys.executable, "-m", "pip", "download", *hashed, "--dest", f"{folder}/pip"])
    return sorted(folder.glob("pip/pip-*.whl"))


def wheels_of_the_index(folder: Path) -> list[Path]:
    index = package_index().rstrip("/") + "/pip/"
    try:
        page = fetch(index).decode()
        link = re.search(rf'href="([^"]*{re.escape(PIP_WHEEL)})[#"]', page)
        content = fetch(urllib.parse.urljoin(index, link[1])) if link else b""
    except (OSError, ValueError):  # no network, no certificates, or an index that is none
        return []
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        return []
    (folder / PIP_WHEEL).write_bytes(content)
    return [folder / PIP_WHEEL]


def wheels_of_debian(folder: Path) -> list[Path]:
    # The tests unpack servers in the same way; the file is loaded by its path, for its package needs more.
    spec = importlib.util.spec_from_file_location("debian", ROOT / "src/outbox/testing/servers/debian.py")
    if spec is None or spec.loader is None:
        return []
    debian = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(debian)
    unpacked = folder / "debian"
    unpacked.mkdir()
    try:
        debian.unpack(["python3-pip-whl"], unpacked)
    except debian.PackagesUnavailable:
        return []
    return sorted(unpacked.glob("usr/share/python-wheels/pip-*.whl"))


def package_index() -> str:
    """The index that pip was told to ask, read without pip; empty if it was told of none."""
    settings = configparser.ConfigParser(interpolation=None, strict=False)
    home = Path.home()
    settings.read(["/etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf"])
    configured = settings.get("global", "index-url", fallback="")
    return os.environ.get("PIP_INDEX_URL") or configured


def fetch(url: str) -> bytes:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"not a web address: {url}")
    trust = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(url, timeout=30, context=trust) as answer:  # noqa: S310 - checked above
        content: bytes = answer.read()
        return content


def use_a_new_enough_python() -> None:
    """Go on in a newer Python of this machine where the one that was called is too old."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    for minor in range(20, OLDEST_PYTHON[1] - 1, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer and quietly([newer, "-c", ""]) == 0:
            say(f"Python {sys.version.split()[0]} is too old, going on with {newer}")
            raise SystemExit(run([newer, *sys.argv]))
    stop(f"Python 3.{OLDEST_PYTHON[1]} or newer is needed, and this is {sys.version.split()[0]}")


def run(command: list[str]) -> int:
    """Run a command in sight of the user; when we are told to end, it ends first and in its own way."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        if number == signal.SIGTERM:  # Ctrl-C has reached the whole terminal, the command included
            process.send_signal(number)

    process = subprocess.Popen(command, env=surroundings())
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if told:
        raise SystemExit(128 + told[0])
    return code if code >= 0 else 128 - code


def quietly(command: list[str], **variables: str) -> int:
    """Run a command out of sight, for its exit code."""
    done = subprocess.run(command, env={**surroundings(), **variables}, capture_output=True, check=False)
    return done.returncode


def surroundings() -> dict[str, str]:
    """The environment variables, without those that would lead out of the virtual environment."""
    astray = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    # The tests start hundreds of processes; without bytecode, each of them would compile the library anew.
    slow = {"PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in astray | slow}
    # The last one keeps an announcement of the site's theme out of its output.
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "NO_MKDOCS_2_WARNING": "1"}


def say(text: str) -> None:
    print(text, flush=True)


def stop(text: str) -> NoReturn:
    raise SystemExit(f"dev.py: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
