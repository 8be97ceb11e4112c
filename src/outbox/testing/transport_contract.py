"""TransportContract: what every transport must do. Inherit it for a new broker:

    class TestMyTransport(TransportContract):
        @pytest.fixture
        async def make_transport(self): ...   # make_transport() -> Transport, all on the same broker, nothing in it

What a transport declares in its `features` that it cannot do is not asked of it: these cases are skipped, with the
feature as the reason.
"""

from __future__ import annotations

from outbox.testing.transport.cases import MakeTransport
from outbox.testing.transport.dead_letters import TransportDeadLetterCases
from outbox.testing.transport.delivering import TransportDeliveringCases
from outbox.testing.transport.publishing import TransportPublishingCases
from outbox.testing.transport.settling import TransportSettlingCases

__all__ = ["MakeTransport", "TransportContract"]


class TransportContract(
    TransportPublishingCases, TransportDeliveringCases, TransportSettlingCases, TransportDeadLetterCases
):
    """Publishing, delivering, and every outcome."""
