"""SELECT … FOR UPDATE SKIP LOCKED, DELETE … IN: taking messages from MariaDB by hand, with no promise kept at all."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

import asyncmy
from asyncmy.cursors import DictCursor

from bench.programs.telling import Telling

BATCH = 500
PAUSE = 0.001  # seconds between two looks at an empty table


async def main() -> None:
    table, address = os.environ["OUTBOX_TABLE_NAME"], urlsplit(os.environ["BENCH_URL"])
    connection = await asyncmy.connect(
        host=address.hostname, port=address.port, user=address.username, database=address.path.lstrip("/")
    )
    select = f"SELECT * FROM {table} ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
    tell = Telling()
    async with connection.cursor(DictCursor) as cursor:
        while True:
            await cursor.execute(select)
            rows = await cursor.fetchall()
            if rows:
                await cursor.execute(f"DELETE FROM {table} WHERE id IN ({', '.join(str(row['id']) for row in rows)})")
            await connection.commit()
            for row in rows:
                tell(row["body"])
            if not rows:
                await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    asyncio.run(main())
