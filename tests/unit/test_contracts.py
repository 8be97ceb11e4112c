"""Contracts report what they did not ask: a case that a feature switches off is skipped, by the feature's name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_tells_how_many_cases_passed_and_for_which_features_others_were_skipped() -> None:
    contracts = ["-k", "TestMemoryTransport or TestFunctionTransport", "tests/contract"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *contracts]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    told = re.findall(r"^contract cases: (\w+) (\d+) passed, (.*)$", ran.stdout, re.MULTILINE)
    assert {name: skipped for name, _, skipped in told} == {
        "FunctionTransport": "0 skipped",
        "MemoryTransport": "2 skipped (keeps_order=False 1, largest_message=None 1)",
    }
    assert all(int(passed) > 10 for _, passed, _ in told)
