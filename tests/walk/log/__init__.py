"""Relays that read the write-ahead log of a real PostgreSQL."""
