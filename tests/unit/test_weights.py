"""Weight: a claim takes as many messages as are fetched in time."""

from __future__ import annotations

from outbox.stores.selecting import AIM, QUICK, SMALLEST_AIM, Weight

MANY = 500
MIB = 1024 * 1024


def test_a_claim_takes_what_is_wanted_while_nothing_is_known_or_messages_are_small() -> None:
    weight = Weight()
    assert weight.limit(MANY) == MANY
    weight.took(100, 100 * 1000, 0.01)
    assert weight.limit(MANY) == MANY
    weight.took(100, 0, 0.01)
    assert weight.limit(MANY) == MANY


def test_a_claim_of_large_messages_takes_so_many_as_the_aim_has_bytes() -> None:
    weight = Weight()
    weight.took(MANY, MANY * MIB, QUICK)
    assert weight.limit(MANY) == AIM // MIB
    assert weight.limit(3) == 3
    assert weight.limit(0) == 0


def test_a_message_larger_than_the_aim_is_claimed_alone() -> None:
    weight = Weight()
    weight.took(1, 2 * AIM, QUICK)
    assert weight.limit(MANY) == 1


def test_larger_messages_count_at_once_and_smaller_ones_bit_by_bit() -> None:
    weight = Weight()
    weight.took(MANY, MANY * 100, QUICK)
    weight.took(8, 8 * MIB, QUICK)
    assert weight.limit(MANY) == 8
    limits = []
    for _ in range(8):
        weight.took(8, 8 * 100, QUICK)
        limits.append(weight.limit(MANY))
    assert limits == sorted(limits)
    assert limits[0] == 15
    assert limits[-1] == MANY


def test_after_a_claim_that_was_not_fetched_one_message_tells_what_they_weigh() -> None:
    weight = Weight()
    weight.took(MANY, MANY * 100, QUICK)
    weight.took_too_long()
    assert weight.limit(MANY) == 1
    assert weight.limit(0) == 0
    weight.took(1, MIB, 0.1)
    assert weight.limit(MANY) == 4
    weight.took_too_long()
    weight.took(1, MIB, 0.1)
    assert weight.limit(MANY) == 2
    weight.took(2, 2 * MIB, QUICK + 1)
    assert weight.limit(MANY) == 2
    weight.took(2, 2 * MIB, QUICK)
    assert weight.limit(MANY) == 4


def test_however_long_the_database_was_silent_a_few_quick_claims_mend_it() -> None:
    weight = Weight()
    for _ in range(100):
        weight.took_too_long()
    claims = 0
    while weight.limit(MANY) < MANY:
        count = weight.limit(MANY)
        weight.took(count, count * 1000, 0.01)
        claims += 1
        assert claims < 10
    assert SMALLEST_AIM < MANY * 1000 < AIM
