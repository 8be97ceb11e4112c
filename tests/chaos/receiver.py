"""Receiver: the application that takes messages over HTTP, for uvicorn. It handles them as a worker does."""

from __future__ import annotations

import logging

import outbox
from tests.chaos.doorway import SECRET
from tests.chaos.listeners import listeners

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

app = outbox.http_app(listeners, secrets=SECRET)
