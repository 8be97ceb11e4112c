"""Fixtures for this project's behaviour."""

from __future__ import annotations

import asyncio

import pytest

from .users import Arrivals


@pytest.fixture
def arrivals() -> Arrivals:
    """What listeners were called with."""
    return asyncio.Queue()
