"""Telling: a worker says on stdout how many messages its listener has seen."""

from __future__ import annotations

import json
import os
import time
from typing import Any


class Telling:
    """Called for each message; says `count number moment` every so often, in nanoseconds of the machine's clock."""

    def __init__(self) -> None:
        self._every = int(os.environ["BENCH_TELL_EVERY"])
        self._count = 0

    def __call__(self, body: Any) -> None:
        self._count += 1
        if self._count % self._every == 0:
            moment = time.monotonic_ns()
            number = (json.loads(body) if isinstance(body, bytes) else body)["number"]
            print(self._count, number, moment, flush=True)
