"""Settings: what the command line says."""

from __future__ import annotations

from dataclasses import dataclass

from bench import contenders
from bench.contenders import Contender
from bench.database import Database


@dataclass(frozen=True)
class Settings:
    rounds: int
    peers_python: str | None  # of an environment with what bench/requirements.txt names
    against: str | None = None  # the commit to compare with
    smoke: bool = False  # few messages and short times: whether it runs, not how fast

    def peers(self, database: Database) -> list[Contender]:
        if self.peers_python is None:
            return []
        return [
            contenders.faststream_outbox(database, self.peers_python),
            contenders.pgqueuer(database, self.peers_python),
        ]
