"""A store does what a model of it says, whatever its clients do in whatever order.

`OUTBOX_MODEL=deep` looks for as long as you like where the test command looks for seconds.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import StoreMachine

IS_DEEP = os.environ.get("OUTBOX_MODEL") == "deep"
EXAMPLES = {"sqlite+aiosqlite": 18, "postgresql+asyncpg": 10, "postgresql+psycopg": 5, "mariadb+asyncmy": 5}
PROFILE = settings(
    deadline=None,
    derandomize=not IS_DEEP,
    database=None,
    print_blob=True,
    stateful_step_count=100 if IS_DEEP else 40,
    report_multiple_bugs=False,
    phases=[Phase.generate] if IS_DEEP else [Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0 if IS_DEEP else 600)
@pytest.mark.parametrize("routes", [True, False], ids=["queues", "relay"])
def test_a_store_does_what_the_model_says(database_url: str, table_name: str, routes: bool) -> None:
    make: Any = partial(StoreMachine, database_url, table_name, routes=routes)  # which makes what a class would
    examples = 100_000 if IS_DEEP else EXAMPLES[database_url.split("://")[0]]
    run_state_machine_as_test(make, settings=settings(PROFILE, max_examples=examples))
