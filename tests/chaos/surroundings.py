"""Surroundings: what the rig tells the processes it starts, in their environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.chaos.history import Historian


@dataclass(frozen=True)
class Surroundings:
    """Read by producers and workers, written by the rig."""

    name: str
    folder: Path
    seed: int
    slow: float  # seconds that a slow listener takes
    slow_share: float  # of all messages
    kills: float  # share of messages that kill their worker
    mistakes: float  # share of messages, and of transactions, with which something careless is done
    rate: float  # messages that a producer emits in a second
    accounts: int  # whose balances the services keep

    def as_environment(self) -> dict[str, str]:
        return {f"CHAOS_{name.upper()}": str(value) for name, value in vars(self).items()}

    @classmethod
    def here(cls) -> Surroundings:
        told = {name: os.environ[f"CHAOS_{name.upper()}"] for name in cls.__dataclass_fields__}
        return cls(
            name=told["name"],
            folder=Path(told["folder"]),
            seed=int(told["seed"]),
            slow=float(told["slow"]),
            slow_share=float(told["slow_share"]),
            kills=float(told["kills"]),
            mistakes=float(told["mistakes"]),
            rate=float(told["rate"]),
            accounts=int(told["accounts"]),
        )

    @property
    def histories(self) -> Path:
        return self.folder / "histories"

    @property
    def children(self) -> Path:
        """A folder with a file for each forked process that has not ended."""
        return self.folder / "children"

    @property
    def enough(self) -> Path:
        """A file that is there while so much waits that producers should hold back."""
        return self.folder / "enough"


@cache
def historian() -> Historian:
    """This process's own history."""
    here = Surroundings.here()
    return Historian(here.histories / f"{here.name}.jsonl")
