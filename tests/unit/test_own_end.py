"""Which statements would end a listener's transaction."""

from __future__ import annotations

import pytest

from outbox.inbound.own_end import ends_a_transaction


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("COMMIT", "COMMIT"),
        ("/* a */ -- b\n ; /* c */ commit", "COMMIT"),
        ("rollback work", "ROLLBACK"),
        ("ROLLBACK TO SAVEPOINT a", None),
        ("SELECT 'COMMIT'", None),
        ("/* COMMIT */ SELECT 1", None),
        ("-- COMMIT\nSELECT 1", None),
        ("DO $$ BEGIN PERFORM 1; END $$", None),
        ("endings", None),
    ],
)
def test_the_first_word_behind_comments_decides(statement: str, word: str | None) -> None:
    assert ends_a_transaction(statement) == word


def test_many_comments_are_read_once() -> None:
    assert ends_a_transaction("/* a */ " * 10_000 + "SELECT 1 /* b */") is None
