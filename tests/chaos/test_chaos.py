"""No promise breaks, whatever happens to processes, connections and the database; `make chaos` does it for minutes."""

from __future__ import annotations

import pytest

from tests.chaos.order import ordering
from tests.chaos.profiles import SHORT
from tests.chaos.report import Report
from tests.chaos.run import run

pytestmark = pytest.mark.timeout(900)  # a run takes a minute; on a machine that does other things, several


def test_faults_of_every_kind_break_no_promise_on_postgresql() -> None:
    check(run(SHORT["postgresql"], 1))


def test_faults_break_no_promise_on_sqlite() -> None:
    check(run(SHORT["sqlite"], 3))


def test_faults_break_no_promise_on_mariadb() -> None:
    check(run(SHORT["mariadb"], 5))


def test_faults_break_no_promise_between_two_services() -> None:
    check(run(SHORT["two-services"], 2600))


def test_faults_break_no_promise_over_http() -> None:
    check(run(SHORT["http"], 245))


def test_faults_break_no_promise_and_no_order_from_the_log() -> None:
    report = run(SHORT["wal"], 18)
    check(report)
    assert ordering(report.history, report.tables).compared, "some messages came by the log"


def check(report: Report) -> None:
    print("\n".join(report.lines()))  # pytest shows it if something is wrong
    assert not report.violations, f"histories and logs are in {report.folder}"
    assert report.messages >= report.profile.messages
    assert len(report.history.faults) + report.missed.total() == report.profile.faults
