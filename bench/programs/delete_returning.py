"""DELETE … RETURNING: the limit of taking messages from a table of the same shape, with no promise kept at all."""

from __future__ import annotations

import asyncio
import os

import asyncpg

from bench.programs.telling import Telling

BATCH = 500
PAUSE = 0.001  # seconds between two looks at an empty table


async def main() -> None:
    table = os.environ["OUTBOX_TABLE_NAME"]
    connection = await asyncpg.connect(os.environ["BENCH_URL"])
    statement = (
        f"DELETE FROM {table} WHERE id = ANY(ARRAY"
        f"(SELECT id FROM {table} ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED)) RETURNING *"
    )
    tell = Telling()
    while True:
        rows = await connection.fetch(statement)
        for row in rows:
            tell(row["body"])
        if not rows:
            await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    asyncio.run(main())
