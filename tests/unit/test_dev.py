"""dev.py: its commands are where people look for them, and the short check starts no server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = (ROOT / "dev.py").read_text()
COMMANDS = re.findall(r'^        "(\w+)": \1,$', PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_in_the_help_the_makefile_and_the_page_for_contributors(command: str) -> None:
    help_text = PROGRAM.partition('"""')[2].partition('"""')[0]
    assert re.search(rf"^    python3 dev\.py {command}\b", help_text, re.MULTILINE)
    [targets] = re.findall(r"^(demo [\w ]+):$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command in targets.split()
    assert f"`python3 dev.py {command}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_short_check_asks_the_parts_and_the_contracts_and_speaks_to_no_server() -> None:
    collect = ["tests/unit", "tests/contract", "--no-servers", "--collect-only", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *collect], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    ids = [line for line in ran.stdout.splitlines() if "::" in line]
    contracts = {each.split("::")[1] for each in ids if each.startswith("tests/contract/") and each.count("::") > 1}
    assert {"TestStores", "TestPoorStores", "TestMemoryTransport", "TestDatabaseTransport"} <= contracts
    assert not contracts & {"TestPooledStores", "TestRabbitmqTransport", "TestPlainRabbitmqTransport"}
    assert not [each for each in ids if re.search(r"contract.*\[(postgresql|mariadb)\+|_server\.py|test_servers", each)]
