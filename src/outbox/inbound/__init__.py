"""Inbound: from the transport through the worker to the listener."""
