"""Tables: every name derives from one, and none of them can carry anything but a name."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import UniqueConstraint, create_engine, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from outbox import ConfigurationError, Outbox
from outbox.stores.tables import Tables

LONGEST_NAME = 63  # bytes, where PostgreSQL cuts
LONGEST = "t" * 40
DIALECTS = [pytest.param(postgresql.dialect(), id="PostgreSQL"), pytest.param(sqlite.dialect(), id="SQLite")]

HOSTILE: list[Any] = [
    # Nothing, and what is no text.
    *("", " ", "  outbox", "outbox ", None, 5, 1.5, True, b"outbox", ["outbox"], ("outbox",), {"outbox"}, object()),
    # Quoting and statements.
    *("a;b", "outbox; DROP TABLE orders", "outbox;--", "outbox--", "outbox/*", "*/outbox", "outbox#", "outbox'"),
    *("'outbox'", 'out"box', '"outbox"', '""', "`outbox`", "[outbox]", "outbox\\", "\\", "out'box'--", "x' OR '1'='1"),
    *("outbox)", "outbox(id", "outbox, orders", "outbox WHERE 1=1", "$1", ":name", "%s", "%(name)s", "{0}", "{name}"),
    *("public.outbox", ".outbox", "outbox.", "a.b.c", "outbox@link", "outbox|other", "outbox&other", "~outbox", "!a"),
    # Characters that are not seen, or seen as others.
    *(
        "out\x00box",
        "\x00",
        "outbox\x00",
        "out\nbox",
        "outbox\n",
        "\noutbox",
        "out\rbox",
        "out\tbox",
        "\x7f",
        "\x1b[31m",
    ),
    *(
        "out\u200bbox",
        "out\u202ebox",
        "\ufeffoutbox",
        "out\xa0box",
        "\u043eutbox",
        "outbo\u0445",
        "\uff4futbox",
        "\ud800",
        "out\u0301box",
    ),
    # Letters and digits that SQL does not count as such.
    *("tëst", "größe", "表", "\u0661outbox", "outbox²", "outbox\u0661", "ªa", "ﬁle", "🎉"),
    # Places.
    *("1outbox", "0", "-outbox", "+outbox", "out-box", "out box", "../outbox", "/etc/passwd", "C:outbox", "~"),
    # Length.
    *("t" * 41, "t" * 63, "t" * 64, "t" * 10_000),
]


def shown(name: object) -> str:
    return ascii(name)[:40] if isinstance(name, str | bytes) else type(name).__name__


@pytest.mark.parametrize("name", HOSTILE, ids=shown)
def test_what_is_no_plain_name_is_refused_as_a_table(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="table_name="):
        Tables.named(name)


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if name is not None and name not in ("t" * 41, "t" * 63)], ids=shown
)
def test_what_is_no_plain_name_is_refused_as_a_schema(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="schema="):
        Tables.named("outbox_table", name)


def test_there_are_enough_hostile_names() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize(
    "name", ["o", "_", "_outbox", "Outbox", "OUTBOX", "outbox_2", "select", "order", "user", LONGEST]
)
def test_a_plain_name_is_taken_and_works_even_if_it_is_a_word_of_sql(name: str) -> None:
    engine = create_engine("sqlite://")
    outbox = Outbox(db_engine=engine, table_name=name)
    with engine.begin() as connection:
        assert outbox.emit_sync(connection, "order.created", {"id": 1}) is not None
        assert name in inspect(connection).get_table_names()
    engine.dispose()


async def test_a_name_that_needs_quotes_works_from_emit_to_status(
    make_outbox: Callable[..., Outbox], table_name: str
) -> None:
    outbox = make_outbox(table_name=f"OutBox_{table_name}")
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    backlog = await outbox.backlog()
    assert (backlog.waiting, backlog.rows_written) == (1, 1)


def every_name(tables: Tables) -> list[str]:
    """Every name that a database will hold for these tables, those included that PostgreSQL makes up."""
    names = []
    for table in tables.metadata.tables.values():
        names += [table.name, f"{table.name}_pkey"]
        names += [f"{table.name}_{column.name}_seq" for column in table.columns if column.identity is not None]
        names += [str(index.name) for index in table.indexes]
        names += [str(each.name) for each in table.constraints if isinstance(each, UniqueConstraint)]
    return names


def test_every_derived_name_of_the_longest_table_is_kept_whole() -> None:
    names = every_name(Tables.named(LONGEST))
    assert len(names) >= 15
    assert [name for name in names if len(name.encode()) > LONGEST_NAME] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("schema", [None, "s" * 63])
def test_every_derived_name_begins_with_the_tables_name(schema: str | None) -> None:
    tables = Tables.named("shop", schema)
    assert all(name == "shop" or name.startswith("shop_") for name in every_name(tables))
    assert {table.schema for table in tables.metadata.tables.values()} == {schema}


def test_two_outboxes_share_no_name_even_if_one_is_named_like_a_part_of_the_other() -> None:
    first, second = every_name(Tables.named("shop")), every_name(Tables.named("shop_2"))
    assert not set(first) & set(second)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("name", "schema"), [("outbox_table", None), ("select", "order"), (LONGEST, "s" * 63)])
def test_the_tables_compile_on_every_database_with_odd_names_in_quotes(
    dialect: Any, name: str, schema: str | None
) -> None:
    statements = []
    for table in Tables.named(name, schema).metadata.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=dialect)))
        statements += [str(CreateIndex(index).compile(dialect=dialect)) for index in table.indexes]
    script = ";\n".join(statements)
    assert script.count("CREATE TABLE") == 7
    assert script.count("INDEX") >= 7
    if name == "select":
        assert '"select"' in script
        assert " select " not in script


@pytest.mark.parametrize("dialect", DIALECTS)
def test_partial_indexes_are_partial_on_every_database(dialect: Any) -> None:
    tables = Tables.named("outbox_table")
    partial = {str(index.name): str(CreateIndex(index).compile(dialect=dialect)) for index in tables.messages.indexes}
    assert all(" WHERE " in statement for statement in partial.values()), partial
    assert "UNIQUE" in partial["outbox_table_timer"]


def test_the_claim_is_served_in_its_order_by_an_index() -> None:
    [claim] = [index for index in Tables.named("o").messages.indexes if index.name == "o_claim"]
    assert [column.name for column in claim.columns] == ["destination", "due_at", "id"]


def test_no_index_holds_what_a_lease_changes() -> None:
    changed = {"lease_token", "lease_until", "starts"}
    for index in Tables.named("o").messages.indexes:
        assert not changed & {column.name for column in index.columns}
        assert not any(name in str(CreateIndex(index).compile(dialect=postgresql.dialect())) for name in changed)


def test_tables_that_live_fast_are_tuned_for_it_on_postgresql() -> None:
    tables = Tables.named("select", "order")
    for table in (tables.messages, tables.dead_letters, tables.inbox):
        statement = str(CreateTable(table).compile(dialect=postgresql.dialect()))
        assert " USING heap WITH (" in statement and "autovacuum_vacuum_scale_factor = 0.02" in statement
        assert ("fillfactor = 45" in statement) == (table is tables.messages)
        assert "/* " in statement and "vacuum comes after a thousand dead rows" in statement
        assert ("leases are written in place" in statement) == (table is tables.messages)
        assert not {":", ";", "%"} & set(statement.partition("/*")[2]), "op.execute, a splitter or a driver reads them"


def test_rows_are_numbered_in_64_bits_on_postgresql_and_never_again_on_sqlite() -> None:
    tables = Tables.named("o")
    for table in (tables.messages, tables.dead_letters):
        assert "id BIGINT GENERATED" in str(CreateTable(table).compile(dialect=postgresql.dialect()))
        assert "AUTOINCREMENT" in str(CreateTable(table).compile(dialect=sqlite.dialect()))


def test_every_moment_is_stored_with_its_time_zone() -> None:
    for table in Tables.named("o").metadata.tables.values():
        for column in table.columns:
            if column.name.endswith(("_at", "_until")):
                assert column.type.timezone is True, f"{table.name}.{column.name}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("schema", [None, "shop"])
def test_the_metadata_of_an_outbox_is_what_alembic_compares(schema: str | None) -> None:
    outbox = Outbox(db_engine_url="sqlite://", table_name="orders", schema=schema)
    prefix = "" if schema is None else f"{schema}."
    derived = ("", "_dead_letters", "_bindings", "_inbox", "_state", "_circuits", "_owners")
    assert set(outbox.metadata.tables) == {f"{prefix}orders{name}" for name in derived}
