"""mypy and pyright accept the typical uses and reject each of the typical mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Found = dict[int, set[str]]  # by the number of a line


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """What mypy says of both files, by their names."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--no-error-summary", "uses.py", "mistakes.py"]
    command[-2:] = [str(HERE / name) for name in command[-2:]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    errors: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file, line, code in re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", ran.stdout, re.MULTILINE):
        errors[Path(file).name][int(line)].add(code)
    return {name: dict(lines) for name, lines in errors.items()}


def test_typical_uses_are_accepted(found: dict[str, Found]) -> None:
    assert set(found) == {"mistakes.py"}, found


def test_each_typical_mistake_is_rejected_for_its_reason(found: dict[str, Found]) -> None:
    assert found["mistakes.py"] == mistakes()


def test_pyright_accepts_the_same_uses_and_rejects_the_same_lines() -> None:
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable]
    command += [str(HERE / "uses.py"), str(HERE / "mistakes.py")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    errors = json.loads(ran.stdout)["generalDiagnostics"]
    rejected = {(Path(error["file"]).name, error["range"]["start"]["line"] + 1) for error in errors}
    assert rejected == {("mistakes.py", line) for line in mistakes()}


def mistakes() -> Found:
    """What each line of the mistakes says is wrong with it."""
    lines = (HERE / "mistakes.py").read_text().splitlines()
    said = ((number, re.search(r"# error: ([a-z, -]+)$", line)) for number, line in enumerate(lines, 1))
    return {number: set(codes[1].split(", ")) for number, codes in said if codes}
