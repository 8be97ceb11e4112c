"""Structure: files that fit in the head, names used once, and no module that imports itself by way of others.

What breaks a rule today stands in `STILL_TOO_LARGE`, `STILL_USED_TWICE` and `STILL_IN_CYCLES`, and nothing may join it:
an entry that is no longer needed fails too, until it is removed.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

SOURCES = Path(__file__).parents[2] / "src/outbox"

NEEDS_A_REASON = 400  # lines
LARGEST = 500
SMALLER = {"instance.py": 300}  # a facade wires the parts and delegates

# More than NEEDS_A_REASON lines, and better not divided.
REASONS = {
    "transports/rabbitmq/frames.py": "one protocol, frame by frame",
}

# Exceptions of today, with the number of lines that they may not exceed.
STILL_TOO_LARGE: dict[str, int] = {}

# Names that several classes share today, with the number of these classes.
STILL_USED_TWICE: dict[str, int] = {}

# Modules that import each other today, at the top, in a function or for types alone.
STILL_IN_CYCLES: frozenset[str] = frozenset()


def limit(path: str) -> int:
    return SMALLER.get(path, LARGEST if path in REASONS else NEEDS_A_REASON)


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Lines of each file."""
    return {file.relative_to(SOURCES).as_posix(): len(file.read_text().splitlines()) for file in SOURCES.rglob("*.py")}


def test_a_file_is_small_or_has_a_reason(sizes: dict[str, int]) -> None:
    too_large = {
        path: size for path, size in sizes.items() if size > limit(path) and size > STILL_TOO_LARGE.get(path, 0)
    }
    assert not too_large, "divide these; at most LARGEST lines are allowed to a file that REASONS has a reason for"


def test_a_file_that_became_small_is_no_exception_any_more(sizes: dict[str, int]) -> None:
    small = [path for path in STILL_TOO_LARGE if sizes.get(path, 0) <= limit(path)]
    assert not small, "remove these from STILL_TOO_LARGE"


def test_a_reason_is_given_for_what_needs_one(sizes: dict[str, int]) -> None:
    needless = [path for path in REASONS if sizes.get(path, 0) <= NEEDS_A_REASON]
    assert not needless, "remove these from REASONS"


def test_no_two_classes_have_one_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file.relative_to(SOURCES).as_posix())
    shared = {name: files for name, files in found.items() if len(files) > 1}
    new = {name: files for name, files in shared.items() if len(files) > STILL_USED_TWICE.get(name, 1)}
    assert not new, "a search for one of these names finds two things: name them apart"
    apart = [name for name, count in STILL_USED_TWICE.items() if len(shared.get(name, ())) < count]
    assert not apart, "fewer classes share these names than STILL_USED_TWICE says"


def test_no_module_imports_itself_by_way_of_others_and_none_hides_it_under_type_checking() -> None:
    graph = grimp.build_graph("outbox", cache_dir=None)  # with imports in functions and those for types alone
    upstream = {module: graph.find_upstream_modules(module) for module in graph.modules}
    in_cycles = {module for module, above in upstream.items() if any(module in upstream[each] for each in above)}
    assert not in_cycles - STILL_IN_CYCLES, "these import each other: one of them knows too much"
    assert not STILL_IN_CYCLES - in_cycles, "remove these from STILL_IN_CYCLES"


def test_nothing_is_made_under_the_lock_of_a_class() -> None:
    """Python 3.11 has one in `functools.cached_property`: other threads, and children that are forked, wait for it."""
    using = [file.name for file in sorted(SOURCES.rglob("*.py")) if imports_cached_property(file)]
    assert not using, "these use functools.cached_property: core.kept_property has no lock"


def imports_cached_property(file: Path) -> bool:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    named += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return "cached_property" in named


def test_no_test_is_imported_for_what_stands_beside_it() -> None:
    """Two files of tests that share something get it from a third one: `tests/support`, or a module of their folder."""
    tests = SOURCES.parents[1] / "tests"
    importing = {
        file.relative_to(tests).as_posix(): node.module
        for file in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1].startswith("test_")
    }
    assert not importing


def test_every_module_at_the_top_has_its_layer() -> None:
    tool = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [contract for contract in tool["contracts"] if contract["type"] == "layers"]
    assert layers["exhaustive"]
    assert layers["containers"] == ["outbox"]
    assert not layers.get("exhaustive_ignores") and not layers.get("ignore_imports")
