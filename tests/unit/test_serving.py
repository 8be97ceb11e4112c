"""Serving: which event loop a relay or a worker of the command line runs on."""

from __future__ import annotations

import sys

import pytest
import uvloop

from outbox.cli.serving import _quick_loop


def test_it_runs_on_uvloop_where_that_is_installed() -> None:
    make = _quick_loop()
    assert make is not None
    loop = make()
    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_it_runs_on_asyncios_own_where_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _quick_loop() is None
