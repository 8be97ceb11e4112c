"""CircuitCases: what relays tell each other of destinations that do not answer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.attempt import Dead, Reason
from outbox.core.store import Circuit, CircuitState, Store
from outbox.testing.store.cases import LEASE, SHORT, MakeStore, StoreCases, message, queued, settled, soon

NOW = timedelta(0)


async def only(store: Store) -> Circuit:
    """The one circuit of a store."""
    [circuit] = await store.circuits.all()
    return circuit


async def probing(store: Store, lease: timedelta = LEASE) -> int:
    """A probe, as soon as the pause is over."""
    async with asyncio.timeout(30):
        while (probe := await store.circuits.probe("d", lease)) is None:
            await asyncio.sleep(0.02)
    return probe


class CircuitCases(StoreCases):
    """Closed, open, probing."""

    async def test_nothing_is_known_of_destinations_that_always_answered(self, store: Store) -> None:
        assert await store.circuits.all() == []
        assert not await store.circuits.close("d")
        assert await store.circuits.probe("d", LEASE) is None

    async def test_a_circuit_opens_once_whoever_else_had_no_answer(self, store: Store, make_store: MakeStore) -> None:
        stores = [store, *(make_store() for _ in range(4))]
        news = await asyncio.gather(*(each.circuits.open("d", LEASE, f"away {n}") for n, each in enumerate(stores)))
        assert sorted(news) == [False, False, False, False, True]
        circuit = await only(store)
        assert (circuit.destination, circuit.state, circuit.failures) == ("d", CircuitState.OPEN, 1)
        assert circuit.error == f"away {news.index(True)}"
        assert NOW < circuit.remaining <= LEASE

    async def test_each_destination_has_its_own_circuit(self, store: Store) -> None:
        assert await store.circuits.open(None, LEASE, "one")
        assert await store.circuits.open("d", LEASE, "other")
        assert await store.circuits.close("d")
        found = {circuit.destination: circuit.state for circuit in await store.circuits.all()}
        assert found == {None: CircuitState.OPEN, "d": CircuitState.CLOSED}

    async def test_nobody_probes_before_the_pause_is_over(self, store: Store) -> None:
        await store.circuits.open("d", LEASE, "away")
        assert await store.circuits.probe("d", LEASE) is None
        assert (await only(store)).state is CircuitState.OPEN

    async def test_one_relay_of_many_gets_the_probe(self, store: Store, make_store: MakeStore) -> None:
        await store.circuits.open("d", NOW, "away")
        stores = [store, *(make_store() for _ in range(7))]
        await soon(lambda: _is_over(store))
        probes = await asyncio.gather(*(each.circuits.probe("d", LEASE) for each in stores))
        assert sorted(probe for probe in probes if probe is not None) == [1]
        circuit = await only(store)
        assert (circuit.state, circuit.failures) == (CircuitState.PROBING, 1)
        assert NOW < circuit.remaining <= LEASE

    async def test_a_probe_without_an_answer_opens_it_again_with_one_more_failure(self, store: Store) -> None:
        await store.circuits.open("d", NOW, "away")
        probe = await probing(store)
        assert await store.circuits.open("d", LEASE, "still away", probe=probe)
        circuit = await only(store)
        assert (circuit.state, circuit.failures, circuit.error) == (CircuitState.OPEN, 2, "still away")
        assert circuit.remaining > NOW

    async def test_whoever_has_no_probe_does_not_open_what_is_probed(self, store: Store) -> None:
        await store.circuits.open("d", NOW, "away")
        await probing(store)
        assert not await store.circuits.open("d", LEASE, "a round that began before")
        assert (await only(store)).state is CircuitState.PROBING

    async def test_a_prober_that_died_is_replaced_and_its_late_word_counts_nothing(self, store: Store) -> None:
        await store.circuits.open("d", NOW, "away")
        late = await probing(store, SHORT)
        assert await store.circuits.probe("d", LEASE) is None
        probe = await probing(store)
        assert not await store.circuits.open("d", LEASE, "late", probe=late)
        circuit = await only(store)
        assert (circuit.state, circuit.failures, circuit.error) == (CircuitState.PROBING, 2, "away")
        assert await store.circuits.open("d", LEASE, "in time", probe=probe)

    async def test_an_answer_closes_it_and_the_next_outage_begins_anew(self, store: Store) -> None:
        await store.circuits.open("d", NOW, "away")
        await store.circuits.open("d", NOW, "away", probe=await probing(store))
        await probing(store)
        assert await store.circuits.close("d")
        assert not await store.circuits.close("d")
        assert await only(store) == Circuit(destination="d", state=CircuitState.CLOSED)
        assert await store.circuits.probe("d", LEASE) is None
        assert await store.circuits.open("d", LEASE, "again")
        assert (await only(store)).failures == 1

    async def test_an_answer_closes_even_what_nobody_probes(self, store: Store) -> None:
        await store.circuits.open("d", LEASE, "away")
        assert await store.circuits.close("d")
        assert (await only(store)).state is CircuitState.CLOSED

    async def test_since_when_it_refuses_is_kept_until_it_takes_something(self, store: Store) -> None:
        await store.circuits.open("d", NOW, "refused", refusing=True)
        first = await soon(lambda: _refused_for(store))
        await store.circuits.open("d", NOW, "away", probe=await probing(store))
        await store.circuits.open("d", NOW, "refused", probe=await probing(store), refusing=True)
        assert await store.circuits.close("d", refusing=True)
        assert not await store.circuits.close("d", refusing=True)
        circuit = await only(store)
        assert (circuit.state, circuit.failures, circuit.error) == (CircuitState.CLOSED, 0, "")
        assert circuit.refusing is not None
        assert circuit.refusing >= first
        assert await store.circuits.close("d")
        assert not await store.circuits.close("d")
        assert await only(store) == Circuit(destination="d", state=CircuitState.CLOSED)

    async def test_another_transport_knows_nothing_of_an_outage_of_the_one_before(self, store: Store) -> None:
        await store.maintenance.record_transport("http")
        await store.circuits.open(None, LEASE, "away")
        await store.maintenance.record_transport("routes", switch=True)
        assert await only(store) == Circuit(destination=None, state=CircuitState.CLOSED)

    async def test_a_hostile_error_of_a_destination_is_stored_clean(self, store: Store) -> None:
        await store.circuits.open("d", LEASE, "\x00\ud800'; DROP TABLE x; --" + "ä" * 20_000)
        error = (await only(store)).error
        assert "DROP TABLE" in error
        assert "\x00" not in error
        assert len(error.encode()) <= 8 * 1024

    async def test_the_backlog_tells_of_circuits_and_of_the_reasons_of_dead_letters(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        assert dict((await store.inspection.backlog()).dead_by_reason) == {}
        await queued(engine, store, message(), message(), message())
        for reason in (Reason.REFUSED, Reason.EXHAUSTED, Reason.REFUSED):
            await settled(store, Dead(reason, "no"))
        await store.circuits.open("q", LEASE, "away")
        backlog = await store.inspection.backlog()
        assert dict(backlog.dead_by_reason) == {"exhausted": 1, "refused": 2}
        [circuit] = backlog.circuits
        assert (circuit.destination, circuit.state, circuit.error) == ("q", "open", "away")

    async def test_the_backlog_tells_of_a_circuit_until_its_destination_has_nothing_more_to_get(
        self, engine: AsyncEngine, store: Store
    ) -> None:
        await queued(engine, store, message())
        await store.circuits.open("q", LEASE, "away")
        await store.queues.unbind("q")
        assert [circuit.destination for circuit in (await store.inspection.backlog()).circuits] == ["q"]
        await settled(store, Dead(Reason.EXPIRED, ""))
        assert (await store.inspection.backlog()).circuits == ()


async def _refused_for(store: Store) -> timedelta | None:
    refusing = (await only(store)).refusing
    return refusing if refusing is not None and refusing > timedelta(seconds=0.3) else None


async def _is_over(store: Store) -> bool:
    return (await only(store)).remaining == NOW
