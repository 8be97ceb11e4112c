"""No page claims a version that was not run: the record of the matrix is what README, the classifiers and pages say."""

from __future__ import annotations

import re
import tomllib

from tests.matrix.results import PAGE, page, recorded
from tests.matrix.versions import OLDEST_SQLITE

from .pages import ROOT

NAMED = r"(Python|PostgreSQL|MariaDB|MySQL|RabbitMQ|SQLite) ([\d., and]+\d)"
RESULTS = {result.name: result for result in recorded()}


def test_the_table_is_the_record() -> None:
    text = PAGE.read_text()
    assert page(text, recorded()) == text


def test_every_python_that_the_package_names_was_run() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {name.rpartition(" ")[2] for name in classifiers if re.search(r"Python :: 3\.\d+$", name)}
    assert named == {name.removeprefix("python-") for name in RESULTS if name.startswith("python-")}


def test_every_version_that_the_readme_names_was_run() -> None:
    line = re.search(r"The tests were run on (.*?)\.\s+\[Versions\]", (ROOT / "README.md").read_text(), re.DOTALL)
    assert line is not None
    named = {
        f"{subject.lower()}-{version}"
        for subject, versions in re.findall(
            r"(Python|PostgreSQL|MariaDB|MySQL|RabbitMQ|SQLite) ([\d., and]+\d)", line[1]
        )
        for version in re.findall(r"[\d.]*\d", versions)
    }
    assert named == {name for name in RESULTS if not name.startswith("dependencies-")}


def test_the_oldest_sqlite_is_named() -> None:
    assert f"{OLDEST_SQLITE} is the oldest version" in PAGE.read_text()
