"""A store is made of roles that each fit in the head, and no part hides that it needs another."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

import outbox.stores
from outbox.core.store import Store

MOST_METHODS = 8
ROLES = {
    name: get_type_hints(value.fget)["return"]
    for name, value in inspect.getmembers(Store, lambda value: isinstance(value, property))
}


@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
def test_a_role_has_at_most_eight_methods(role: type) -> None:
    asked = [name for name in dir(role) if not name.startswith("_")]
    abstract: frozenset[str] = getattr(
        role, "__abstractmethods__", frozenset()
    )  # of a base class only what must be written counts
    assert 0 < len(abstract or asked) <= MOST_METHODS


def test_no_part_hides_a_cycle_of_imports() -> None:
    folder = Path(outbox.stores.__file__).parent
    assert not [path for path in folder.rglob("*.py") if "TYPE_CHECKING" in path.read_text()]
