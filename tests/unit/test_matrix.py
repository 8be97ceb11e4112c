"""The matrix counts what its tests said, keeps to the tests of one server, and writes the page from the record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outbox.stores.sqlite.engines import OLDEST
from tests.matrix import results
from tests.matrix.environments import locked_for
from tests.matrix.namespaces import CannotEnter, check
from tests.matrix.results import Result, counted, page
from tests.matrix.selection import belongs
from tests.matrix.versions import OLDEST_SQLITE, VERSIONS, choose

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="no"/></testcase>
<testcase classname="tests.a" name="left out"><skipped message="why"/></testcase>
<testcase classname="tests.a" name="unclean"/>
<testcase classname="tests.a" name="unclean"><error message="left open"/></testcase>
</testsuite></testsuites>"""


def result(name: str, **changed: object) -> Result:
    usual = {"found": ("PostgreSQL 17.11", "Python 3.11.2"), "tests": ("tests/contract",), "belongs": "postgresql"}
    numbers = {"passed": 20, "failed": 0, "skipped": 1, "seconds": 90, "date": "2026-11-19"}
    return Result(name, **{**usual, **numbers, **changed})  # type: ignore[arg-type]


def test_a_test_that_fails_to_clean_up_has_failed_and_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counted(tmp_path / "report.xml") == (1, 2, 1, ("tests.a::bad", "tests.a::unclean"))


def test_the_page_tells_what_was_run_and_what_was_not() -> None:
    before = "# Versions\n\n<!-- table -->\nwhat was before\n<!-- end of the table -->\n\nafter\n"
    text = page(before, [result("postgresql-17", failed=1, failures=("tests.a::bad",))])
    assert "| PostgreSQL 17.11 | Python 3.11.2 | `tests/contract`: tests of postgresql | 20 | 1 | 1 | 2 |" in text
    assert "| PostgreSQL 18 | | not run |" in text
    assert "What failed on PostgreSQL 17.11:\n\n- `tests.a::bad`\n" in text
    assert "what was before" not in text
    assert text.endswith("<!-- end of the table -->\n\nafter\n")
    assert page(text, [result("postgresql-17", failed=1, failures=("tests.a::bad",))]) == text


def test_a_result_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECORD", tmp_path / "results.json")
    monkeypatch.setattr(results, "PAGE", tmp_path / "versions.md")
    (tmp_path / "versions.md").write_text("<!-- table -->\n<!-- end of the table -->\n")
    for passed in (1, 2):
        results.record(result("postgresql-18", passed=passed))
        results.record(result("postgresql-17", passed=passed))
    assert [(each.name, each.passed) for each in results.recorded()] == [("postgresql-17", 2), ("postgresql-18", 2)]
    assert results.recorded()[0] == result("postgresql-17", passed=2)


def test_one_version_is_one_argument() -> None:
    assert [version.name for version in choose(["rabbitmq-4.3"])] == ["rabbitmq-4.3"]
    assert choose([]) == list(VERSIONS)
    with pytest.raises(SystemExit, match=r"no version is called 'rabbitmq-5'; there are .*rabbitmq-4\.3"):
        choose(["rabbitmq-5"])


def test_the_oldest_sqlite_that_is_run_is_the_oldest_that_the_store_takes() -> None:
    assert ".".join(map(str, OLDEST)) == OLDEST_SQLITE


def test_without_root_it_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotEnter, match="only root may"):
        check()


def test_what_the_lock_says_of_another_python_is_judged_by_that_python() -> None:
    for python, django in (("3.11", "django==5"), ("3.14", "django==6")):
        named = [requirement for requirement in locked_for(python) if requirement.startswith("django==")]
        assert [requirement.startswith(django) for requirement in named] == [True]
        assert "--hash=sha256:" in named[0]


class Collected:
    """As much of a collected test as the choice needs."""

    def __init__(self, name: str, *fixtures: str, folder: Path) -> None:
        self.name = name
        self.fixturenames = fixtures
        self.path = folder / "test_it.py"
        self.nodeid = f"tests/walk/test_it.py::{name}"


@pytest.mark.parametrize(
    ("name", "fixtures", "owner"),
    [
        ("test_it[sqlite]", ("database_url",), {"sqlite"}),
        ("test_it[postgresql+asyncpg]", ("database_url",), {"postgresql"}),
        ("test_it[sqlite]", ("database_url", "rabbitmq_url", "rabbitmq", "vhost"), {"sqlite", "rabbitmq"}),
        ("test_it", ("postgresql_url",), {"postgresql"}),
        ("test_it[aio-pika]", ("url",), {"rabbitmq"}),
        ("test_it", ("tmp_path",), set()),
    ],
)
def test_a_test_belongs_to_what_it_speaks_to(
    tmp_path: Path, name: str, fixtures: tuple[str, ...], owner: set[str]
) -> None:
    (tmp_path / "test_it.py").write_text("async def test_it(): ...\n")
    item = Collected(name, *fixtures, folder=tmp_path)
    assert {each for each in ("sqlite", "postgresql", "rabbitmq") if belongs(item, each)} == owner  # type: ignore[arg-type]


def test_a_test_belongs_to_the_server_that_its_module_starts(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("with RabbitMQ() as broker: ...\n")
    item = Collected("test_it", folder=tmp_path)
    assert belongs(item, "rabbitmq")  # type: ignore[arg-type]
    assert not belongs(item, "postgresql")  # type: ignore[arg-type]
