"""Every mutant still fits the sources, and its test still exists; that the test fails is proven by `make mutants`."""

from __future__ import annotations

import ast
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.__main__ import failure
from tests.mutants.mutant import PATCHES, Change, DoesNotApply, Mutant, mutants

ROOT = PATCHES.parents[1]
CONTRACTS = ROOT / "src/outbox/testing"

MUTANTS = [pytest.param(mutant, id=mutant.name) for mutant in mutants()]


def test_there_are_many_and_no_two_alike() -> None:
    assert len(MUTANTS) >= 25
    assert len({mutant.changes for mutant in mutants()}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_it_applies_to_the_sources_as_they_are_and_leaves_them_readable(mutant: Mutant, tmp_path: Path) -> None:
    for path in {change.path for change in mutant.changes}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    mutant.apply(tmp_path)
    for path in {change.path for change in mutant.changes}:
        assert (tmp_path / path).read_text() != (ROOT / path).read_text()
        ast.parse((tmp_path / path).read_text())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_its_test_exists(mutant: Mutant) -> None:
    path, *_, name = mutant.test.split("::")
    where = [*CONTRACTS.rglob("*.py")] if path.startswith("tests/contract/") else [ROOT / path]
    assert any(re.sub(r"\[.*\]$", "", name) in functions(each) for each in where)


def test_sources_that_have_moved_on_are_not_broken_by_guessing(tmp_path: Path) -> None:
    patch = "Promise: p\nKilled by: t\n\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    (tmp_path / "x.patch").write_text(patch)
    mutant = Mutant.read(tmp_path / "x.patch")
    for moved_on in ("a\nz\n", "a\nb\na\nb\n"):
        (tmp_path / "x.py").write_text(moved_on)
        with pytest.raises(DoesNotApply):
            mutant.apply(tmp_path)
    (tmp_path / "x.py").write_text("0\na\nb\n")
    mutant.apply(tmp_path)
    assert (tmp_path / "x.py").read_text() == "0\na\nc\n"


def test_what_git_writes_is_a_patch_once_its_promise_is_put_above_it(tmp_path: Path) -> None:
    lines = [
        "Promise: p",
        "Killed by: t[a-b]",
        "",
        "diff --git a/x.py b/x.py",
        "index 0001..0002 100644",
        "--- a/x.py",
        "+++ b/x.py",
        "@@ -1,3 +1,3 @@ def f",
        " a",
        "",
        "-b",
        "+c",
        "@@ -9 +9 @@",
        "-d",
        "diff --git a/y.py b/y.py",
        "--- a/y.py",
        "+++ b/y.py",
        "@@ -1 +1,2 @@",
        " e",
        "+f",
    ]
    (tmp_path / "break-it.patch").write_text("\n".join(lines) + "\n")
    assert Mutant.read(tmp_path / "break-it.patch") == Mutant(
        "break-it",
        "p",
        "t[a-b]",
        (
            Change("x.py", "a\n\nb\n", "a\n\nc\n"),
            Change("x.py", "d\n", ""),
            Change("y.py", "e\n", "e\nf\n"),
        ),
    )


def test_a_patch_without_its_promise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.patch").write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-b\n+c\n")
    with pytest.raises(ValueError, match="promise"):
        Mutant.read(tmp_path / "x.patch")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ('<failure message="assert 1 == 0&#10;more">trace</failure>', "assert 1 == 0"),
        ('<error message="failed on setup">trace</error>', ""),
        ("", ""),
    ],
)
def test_only_a_test_that_ran_and_failed_kills(tmp_path: Path, ended: str, said: str) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite><testcase>{ended}</testcase></testsuite></testsuites>")
    assert failure(report) == said


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
