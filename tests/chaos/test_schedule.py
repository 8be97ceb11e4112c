"""A seed is enough to strike with the same faults again."""

from __future__ import annotations

import random

import pytest

from tests.chaos.fates import FATES, ORDERS, QUEUES, REPLIES, SWITCHED_OFF, choose
from tests.chaos.profiles import FAIL_OVERS, LONG, SHORT, Profile
from tests.chaos.schedule import Planned, schedule

PROFILES = {
    f"{size} {name}": profile
    for size, each in (("short", SHORT), ("long", LONG), ("long", FAIL_OVERS))
    for name, profile in each.items()
}


def planned(profile: Profile, seed: int) -> list[Planned]:
    return schedule(seed, profile.kinds, profile.faults, profile.seconds, profile.lease, profile.targets)


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_seed_plans_the_same_faults_and_another_one_others(name: str) -> None:
    profile = PROFILES[name]
    assert planned(profile, 1) == planned(profile, 1)
    assert planned(profile, 1) != planned(profile, 2)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_fault_is_planned_in_order_and_for_somebody_who_is_there(name: str, seed: int) -> None:
    profile = PROFILES[name]
    faults = planned(profile, seed)
    assert len(faults) == profile.faults
    assert {fault.kind for fault in faults} == set(profile.kinds)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[-1].at <= profile.seconds
    there = {f"{role}-{number}" for role, many in profile.targets.items() for number in range(many)}
    assert {fault.target for fault in faults} <= there | {"database", "broker", "doorway", "everybody"}


def test_a_freeze_outlasts_the_lease() -> None:
    profile = LONG["postgresql"]
    freezes = [fault for fault in planned(profile, 1) if fault.kind in ("freeze", "black hole")]
    assert freezes
    assert all(fault.seconds > profile.lease for fault in freezes)


def test_every_fate_is_chosen_and_has_a_queue() -> None:
    chance = random.Random(1)
    chosen = [choose(chance, kills=0.01, slow=0.01, mistakes=0.2) for _ in range(5000)]
    planned = [fate for fate in FATES.values() if fate.mistake not in SWITCHED_OFF]
    assert {fate.name for fate, _ in chosen} == {fate.name for fate in planned}
    assert {routing_key for _, routing_key in chosen} == {*ORDERS, *(fate.routing_key for fate in planned)} - {None}
    assert {routing_key for _, routing_key in chosen} <= set(QUEUES) - set(REPLIES)
