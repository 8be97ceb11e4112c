"""The fixtures that pytest finds by the plugin's entry point, in projects of every kind."""

from __future__ import annotations

import tomllib

import pytest

from outbox.testing import plugin

from ..docs.pages import ROOT

pytest_plugins = ["pytester"]

# By its module's name and not its own: the plugin need not be installed for these tests, and may be.
PLUGIN = ("-p", "no:outbox", "-p", "outbox.testing.plugin")

SHOP = """
from outbox import listen
from outbox.testing import Drained, drain


@listen("order.created", queue="invoices", retry_delays=(300,))
async def write_invoice(order: dict, attempt_count: int):
    assert attempt_count == 2


async def order(outbox):
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    return await drain(outbox, [write_invoice]) == Drained(handled=1, retried=1)
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", "-W", "error", *options, timeout=100)


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"outbox": plugin.__name__}


def test_a_project_with_pytest_asyncio_gets_an_outbox_for_each_test(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(
        shop=SHOP,
        test_shop="""
        import pytest

        from shop import order


        @pytest.mark.parametrize("time", [1, 2])
        async def test_an_order(time, outbox_on_sqlite, outbox_sqlite_url):
            assert await order(outbox_on_sqlite)
            assert str(outbox_on_sqlite.engines.asynchronous.url) == outbox_sqlite_url


        def test_that_asks_for_nothing():
            pass
        """,
    )
    run(pytester).assert_outcomes(passed=3)


def test_a_project_without_pytest_asyncio_is_served_as_well(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        shop=SHOP,
        test_shop="""
        import asyncio

        from shop import order


        def test_an_order(outbox_on_sqlite):
            assert asyncio.run(order(outbox_on_sqlite))
        """,
    )
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=1)


def test_a_private_postgresql_is_started_for_those_who_ask(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTBOX_TEST_POSTGRESQL_URL", raising=False)
    pytester.makepyfile(
        shop=SHOP,
        test_shop="""
        import asyncio

        from outbox import Outbox
        from shop import order


        async def on(url):
            outbox = Outbox(db_engine_url=url)
            try:
                return await order(outbox)
            finally:
                await outbox.close()


        def test_an_order(outbox_postgresql_url):
            assert asyncio.run(on(outbox_postgresql_url))


        def test_another_one_on_the_same_server(outbox_postgresql_url):
            assert asyncio.run(on(outbox_postgresql_url))
        """,
    )
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=2)


def test_tests_on_one_server_see_no_rows_of_each_other(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import asyncio

        import pytest


        @pytest.mark.parametrize("turn", [1, 2])
        def test_it_is_empty(outbox_on_postgresql, turn):
            async def emit_and_leave():
                assert await outbox_on_postgresql.messages() == []
                async with outbox_on_postgresql.transaction() as session:
                    await outbox_on_postgresql.emit(session, "order.left", turn)
                assert len(await outbox_on_postgresql.messages()) == 1
                await outbox_on_postgresql.close()

            asyncio.run(emit_and_leave())
        """
    )
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=2)


def test_processes_of_one_run_have_tables_of_their_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    pytester.makepyfile(
        """
        def test_the_name(outbox_on_postgresql):
            assert outbox_on_postgresql.settings.table_name == "outbox_gw7"
        """
    )
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=1)


def test_the_plugin_starts_nothing_and_loads_no_driver(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys


        def test_nothing_was_loaded_that_was_not_asked_for():
            assert "outbox.testing.plugin" in sys.modules
            assert not {"asyncpg", "psycopg", "aiosqlite", "outbox.stores.postgresql"} & sys.modules.keys()
        """
    )
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=1)


def test_whoever_inherits_a_contract_is_told_what_its_assertions_compared(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(
        """
        import pytest

        from outbox.testing.transport_contract import TransportContract
        from outbox.transports.memory import MemoryTransport


        class Nameless(MemoryTransport):
            name = "no name"


        class TestNameless(TransportContract):
            @pytest.fixture
            def make_transport(self):
                return Nameless
        """
    )
    result = run(pytester, "-k", "name_of_one_word")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert False*", "*where False = *built-in method isidentifier*"])
