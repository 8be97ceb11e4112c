"""Benchmarks: every speed is a ratio against a named limit or peer, taken in turns in one run."""

import os

os.environ.setdefault("OUTBOX_TEST_DOWNLOADS", "1")  # of the servers that are measured
