"""The command `outbox`, or our emitter, without the fast paths that BENCH_WITHOUT names."""

from __future__ import annotations

import asyncio
import os
import sys

from bench.without import PATHS
from outbox.cli import main

if __name__ == "__main__":
    for name in filter(None, os.environ["BENCH_WITHOUT"].split(",")):
        PATHS[name]()
    if sys.argv[1:] == ["emitter"]:
        from bench.programs import ours

        asyncio.run(ours.main())
    else:
        main()
