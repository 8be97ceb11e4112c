"""Testing: what a test of an application with an outbox needs, real servers included."""

from outbox.testing.clearing import clear
from outbox.testing.clock import advance
from outbox.testing.draining import drain
from outbox.testing.emission import Emission, emitted, emitted_sync
from outbox.testing.report import Drained, NotDrained

__all__ = ["Drained", "Emission", "NotDrained", "advance", "clear", "drain", "emitted", "emitted_sync"]
