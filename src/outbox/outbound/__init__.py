"""Outbound: from emit through the store and the relay to the transport."""
