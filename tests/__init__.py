"""Tests. They bring up the servers they need, for which packages may be downloaded, unless a variable says 0."""

import os

os.environ.setdefault("OUTBOX_TEST_DOWNLOADS", "1")
