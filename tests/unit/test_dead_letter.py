"""Dead letters: error texts that every database can store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.dead_letter import LARGEST_ERROR, clean

ANY_TEXT = st.text(st.characters())  # half characters included


@given(ANY_TEXT)
def test_a_clean_text_can_be_stored_anywhere(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned.encode("utf-8")) <= LARGEST_ERROR
    assert not any(ord(character) < 32 and character not in "\t\n" for character in cleaned)
    assert "\x7f" not in cleaned


@given(ANY_TEXT)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=500))
def test_a_text_without_oddities_is_kept_as_it_is(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("line one\nline two\tend", "line one\nline two\tend"),
        ("nul\x00", "nul�"),
        ("\x1b[31mred", "�[31mred"),
        ("return\r\n", "return�\n"),
        ("half \ud800", "half ?"),
        ("", ""),
    ],
)
def test_what_cannot_be_stored_is_replaced_in_its_place(text: str, expected: str) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize("character", ["x", "é", "日", "🎉", "\x00"])
@pytest.mark.parametrize("shift", range(4))
def test_a_long_text_is_cut_between_characters_and_says_so(character: str, shift: int) -> None:
    cleaned = clean("a" * shift + character * (LARGEST_ERROR + 1))
    assert LARGEST_ERROR - 4 <= len(cleaned.encode()) <= LARGEST_ERROR
    assert cleaned.endswith("…[cut]")
    kept = cleaned.removesuffix("…[cut]")[shift:]
    assert set(kept) == {"�" if character == "\x00" else character}


def test_a_text_of_exactly_the_largest_size_is_not_cut() -> None:
    assert clean("x" * LARGEST_ERROR) == "x" * LARGEST_ERROR
    assert clean("x" * (LARGEST_ERROR + 1)) != "x" * LARGEST_ERROR


def test_a_huge_text_is_cleaned_quickly() -> None:
    assert len(clean("\x00é" * 5_000_000).encode()) <= LARGEST_ERROR
