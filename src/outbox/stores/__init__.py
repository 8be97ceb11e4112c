"""Stores: one file per database."""
