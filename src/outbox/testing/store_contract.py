"""StoreContract: what every store must do. Inherit it for a new database:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def engine(self): ...           # an AsyncEngine, the caller's
        @pytest.fixture
        async def make_store(self, engine): ...  # make_store(clean_up_after=IMMEDIATELY) -> Store, on the same tables

Each test's name is a promise; the guarantees page names them.
"""

from __future__ import annotations

from outbox.testing.store.cases import MakeStore
from outbox.testing.store.circuits import CircuitCases
from outbox.testing.store.claiming import ClaimingCases
from outbox.testing.store.emitting import EmittingCases
from outbox.testing.store.handing_over import HandingOverCases
from outbox.testing.store.keeping import KeepingCases
from outbox.testing.store.knowing import KnowingCases
from outbox.testing.store.receiving import ReceivingCases
from outbox.testing.store.routing import RoutingCases
from outbox.testing.store.settling import SettlingCases

__all__ = ["MakeStore", "StoreContract"]


class StoreContract(
    EmittingCases,
    ClaimingCases,
    SettlingCases,
    RoutingCases,
    HandingOverCases,
    ReceivingCases,
    KnowingCases,
    CircuitCases,
    KeepingCases,
):
    """Every method and every outcome."""
