"""Programs: a server's binaries in one folder, run as a user that servers accept."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO

from outbox.core.errors import OutboxError

NONE: Mapping[str, str] = MappingProxyType({})


class ServerFailed(OutboxError):
    """The server's programs are there, and one of them failed; the text ends with its last words."""


@dataclass(frozen=True)
class Account:
    """The user a server runs as: ourselves, unless we are root, as whom PostgreSQL refuses to run."""

    uid: int | None = None
    gid: int | None = None

    @property
    def groups(self) -> list[int] | None:
        return None if self.uid is None else []

    def owns(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)

    def may_run(self, program: Path) -> bool:
        """Whether it may run a program, or enter a folder."""
        if self.uid is None or not os.access(program, os.X_OK):
            return os.access(program, os.X_OK)
        asked = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(program)]
        done = subprocess.run(asked, user=self.uid, group=self.gid, extra_groups=self.groups, check=False)
        return done.returncode == 0


@cache
def account() -> Account:
    """Nobody where we are root; ourselves everywhere else."""
    if os.geteuid() != 0:
        return Account()
    import pwd  # not on every system, and needed by root alone

    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


@dataclass(frozen=True)
class Programs:
    """A folder of programs that our account may run, and one line that tells where they came from."""

    folder: Path
    how: str
    libraries: tuple[Path, ...] = ()

    def run(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str] = NONE) -> str:
        """Run one of the programs to its end; return what it said."""
        with tempfile.TemporaryFile("w+") as output:
            code = self.start(command, folder=folder, output=output, variables=variables).wait()
            output.seek(0)
            said = output.read()
        if code:
            raise ServerFailed(f"{command[0]} ended with code {code}: {said[-2000:].strip()}")
        return said

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        output: IO[str],
        variables: Mapping[str, str] = NONE,
        inherited: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start one of the programs in a session of its own, so that Ctrl-C here is no business of its."""
        return subprocess.Popen(
            [str(self.folder / command[0]), *command[1:]],
            cwd=folder,
            env={**self._environment(folder), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=account().uid,
            group=account().gid,
            extra_groups=account().groups,
            start_new_session=True,
            pass_fds=inherited,
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        # Not ours: PGOPTIONS, a locale or a home of the developer's would make the server another one.
        environment = {"PATH": f"{self.folder}:{os.defpath}", "HOME": f"{folder}", "LC_ALL": "C"}
        if self.libraries:
            environment["LD_LIBRARY_PATH"] = ":".join(map(str, self.libraries))
        return environment
