"""Observers: what is told about the work, and to whom."""
