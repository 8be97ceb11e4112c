"""Which statements would end a listener's transaction."""

from __future__ import annotations

import pytest

from outbox.core.transaction_state import transaction_words


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
        ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SET"),
        ("set local transaction  read only, isolation level serializable", "SET"),
        ("SET LOCAL transaction_isolation = 'serializable'", "SET"),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SET"),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", None),
        ("set default_transaction_isolation = 'repeatable read'", "SET"),
        ("SET TRANSACTION READ ONLY; SELECT 'ISOLATION'", None),
        ("SET LOCAL search_path = a", None),
    ],
)
def test_the_first_word_behind_comments_decides(statement: str, word: str | None) -> None:
    assert next(transaction_words(statement), None) == word


def test_many_comments_are_read_once() -> None:
    assert not [*transaction_words("/* a */ " * 10_000 + "SELECT 1 /* b */")]
    assert not [*transaction_words("/* a */ " * 10_000 + "SELECT 1; SELECT 2 /* b */")]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("INSERT INTO a VALUES (1); COMMIT; BEGIN", ["COMMIT", "BEGIN"]),
        ("SELECT 1;\n-- well\n /* then */ rollback", ["ROLLBACK"]),
        ("SELECT 'it''s'; END;", ["END"]),
        ("SELECT E'\\';'; ABORT", ["ABORT"]),
        ("SELECT '\\'; ABORT; SELECT ''", ["ABORT"]),
        ("SELECT 1; SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", ["SET"]),
        ("SELECT '; COMMIT'; SELECT 2", []),
        ("SELECT E'\\'; COMMIT'; SELECT 2", []),
        ('SELECT 1 AS "; COMMIT"; SELECT 2', []),
        ("DO $a$ BEGIN PERFORM 1; END $a$; SELECT $$; COMMIT$$", []),
        ("SELECT 1 /* ; COMMIT */; SELECT 2 -- ; COMMIT", []),
        ("SAVEPOINT a; ROLLBACK TO a; RELEASE a", []),
        ("CREATE TRIGGER a BEFORE INSERT ON b BEGIN SELECT 1; SELECT 2; END", []),
        ("CREATE FUNCTION a() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT", ["COMMIT"]),
    ],
)
def test_each_statement_of_a_text_is_looked_at(statement: str, words: list[str]) -> None:
    assert [*transaction_words(statement)] == words
