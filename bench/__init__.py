"""Benchmarks: every speed is a ratio against a named limit or peer, taken in turns in one run."""
