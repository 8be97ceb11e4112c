"""Transports: one file per broker."""
