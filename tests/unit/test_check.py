"""What databases write back is compared by what it means: casts, parentheses, quotes and spaces mean nothing."""

from __future__ import annotations

import pytest
from sqlalchemy.dialects import postgresql, sqlite

from outbox.stores.ddl import creation, indexes
from outbox.stores.schema_check import NO_DEFAULT, plain_default, shape
from outbox.stores.tables import Tables

TIMER = "unique on timer_id where timer_id is not null and destination = '' and done_at is null"


@pytest.mark.parametrize(
    "definition",
    [
        "CREATE UNIQUE INDEX t ON o (timer_id) WHERE timer_id IS NOT NULL AND destination = '' AND done_at IS NULL;",
        "CREATE UNIQUE INDEX t ON public.o USING btree (timer_id) "
        "WHERE ((timer_id IS NOT NULL) AND ((destination)::text = ''::text) AND (done_at IS NULL))",
        'create unique index "T" on "Order"."select" ("timer_id")\n\twhere timer_id is not null\n'
        "and destination = '' and done_at is null",
        "CREATE UNIQUE INDEX t ON o USING btree (timer_id) WITH (fillfactor='80') "
        "WHERE ((timer_id IS NOT NULL) AND ((destination)::character varying(255) = '') AND (done_at IS NULL))",
    ],
)
def test_the_same_index_has_one_shape_whoever_wrote_it(definition: str) -> None:
    assert shape(definition) == TIMER


@pytest.mark.parametrize(
    ("definition", "found"),
    [
        ("CREATE INDEX t ON o (timer_id)", "on timer_id"),
        ("CREATE INDEX t ON o USING hash (timer_id)", "hash on timer_id"),
        ("CREATE INDEX t ON o USING btree (b, a)", "on b, a"),
        ("CREATE INDEX t ON o USING btree (a DESC, b)", "on a desc, b"),
        ("CREATE INDEX t ON o USING btree (a) INCLUDE (b)", "on a include b"),
        ("CREATE UNIQUE INDEX t ON o USING btree (a) NULLS NOT DISTINCT", "unique on a nulls not distinct"),
        ("CREATE INDEX t ON o (a) WHERE b = 'It''s A'", "on a where b = 'It''s A'"),
        ("CREATE INDEX t ON o USING btree (lower((a)::text))", "on lower a"),
    ],
)
def test_what_makes_an_index_another_one_is_part_of_its_shape(definition: str, found: str) -> None:
    assert shape(definition) == found


@pytest.mark.parametrize("dialect", [postgresql.dialect(), sqlite.dialect()])
def test_no_condition_of_ours_needs_parentheses(dialect: object) -> None:
    """They are dropped before conditions are compared."""
    for table in Tables.named("outbox_table").metadata.sorted_tables:
        written = creation(table, dialect)[1:]  # type: ignore[arg-type]
        assert len(written) == len(indexes(table))
        for statement in written:
            assert " OR " not in statement
            assert statement.count("(") == 1, "that of the columns"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (None, NO_DEFAULT),
        ("0", "0"),
        ("'0'", "0"),
        ("'0'::integer", "0"),
        ("(0)", "0"),
        ("''", ""),
        ("''::character varying", ""),
        ("'A b'::text", "A b"),
        ("FALSE", "false"),
        ("false", "false"),
        ("now()", "now()"),
        ("nextval('t_id_seq'::regclass)", "nextval('t_id_seq')"),
    ],
)
def test_a_default_is_compared_by_its_value(written: str | None, found: str) -> None:
    assert plain_default(written) == found
