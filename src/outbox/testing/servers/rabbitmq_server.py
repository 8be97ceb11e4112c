"""RabbitMQ: a private broker, with its port mapper and its management interface, on loopback ports of their own."""

import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from outbox.testing.servers.ladder import Rung, find, from_debian, installed
from outbox.testing.servers.private_server import PrivateServer, free_port
from outbox.testing.servers.programs import account

_SBIN = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"

_LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
_NO_BUSY_WAITING = "+sbwt none +sbwtdcpu none +sbwtdio none"  # it would take the time of what is being tested

# A node that finds no port mapper starts one that outlives it; this one is there first, and ends with the node.
_NODE_AND_PORT_MAPPER = """
    epmd &
    mapper=$!
    looks=0
    until epmd -names > /dev/null 2>&1; do
        looks=$((looks + 1))
        if [ $looks -gt 500 ]; then
            echo "epmd does not answer on port $ERL_EPMD_PORT (eaddrinuse?)"
            kill $mapper
            exit 1
        fi
        sleep 0.02
    done
    rabbitmq-server &
    node=$!
    trap 'kill -s TERM $node' TERM
    while kill -0 $node 2> /dev/null; do wait $node; code=$?; done
    kill $mapper
    exit $code
"""

# Debian's own script knows only /usr/lib/erlang, wherever its package was unpacked.
_ERL = """#!/bin/sh
export ROOTDIR="{root}" BINDIR="{programs}" EMU=beam PROGNAME=erl
exec "$BINDIR/erlexec" "$@"
"""


class RabbitMQ(PrivateServer):
    """A private RabbitMQ of one node: user and password are `guest`, and only loopback may connect.

    A quorum queue that was declared in the very second before a `kill` may never find a leader again: RabbitMQ 3.10
    writes its name to the disk a moment later.
    """

    name = "rabbitmq"
    final = signal.SIGKILL  # its folder goes too, and an orderly end takes seconds
    port_taken = re.compile("eaddrinuse|dist_port_already_used")

    LADDER: ClassVar[tuple[Rung, ...]] = (
        installed("rabbitmq-server", "rabbitmqctl", folders=f"/{_SBIN}"),
        from_debian("rabbitmq-server", folders=_SBIN),
    )
    ADVICE: ClassVar[str] = (
        "Install RabbitMQ (Debian, Ubuntu: apt-get install rabbitmq-server), or name a broker of yours whose "
        "management interface answers on port 15672: OUTBOX_TEST_RABBITMQ_URL=amqp://user:password@host:5672/"
    )

    def __init__(
        self,
        *,
        management: bool = True,  # the HTTP interface, with which every stop takes five seconds longer
        tls: Path | None = None,  # a folder with ca.pem, certificate.pem and key.pem, for `tls_port`
        settings: Mapping[str, str] | None = None,  # further lines of rabbitmq.conf
        ladder: Sequence[Rung] = LADDER,
    ) -> None:
        super().__init__(find("RabbitMQ", ladder, self.ADVICE))
        self._plugins = ["rabbitmq_management"] if management else []
        self._tls = tls
        self._settings = settings or {}

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def management_url(self) -> str:
        """Where the management interface answers; another address after each start."""
        return f"http://guest:guest@127.0.0.1:{self._management_port}"

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl; return what it said."""
        return self.programs.run(["rabbitmqctl", *arguments], folder=self.folder, variables=self._variables())

    def _prepare(self) -> None:
        self._write("enabled_plugins", f"[{','.join(self._plugins)}].\n")
        erlang = self.programs.folder.parents[3] / "erlang"
        self._erlang = next(iter(erlang.glob("erts-*/bin")), None)
        for file in self._tls.glob("*.pem") if self._tls else ():
            self._write(file.name, file.read_text())
        if self._erlang:
            self._write("erl", _ERL.format(root=erlang, programs=self._erlang)).chmod(0o755)

    def _command(self) -> list[str]:
        self._management_port, self._node_port, self._mapper_port = free_port(), free_port(), free_port()
        settings = {
            "listeners.tcp.default": f"127.0.0.1:{self.port}",
            **(
                {"management.tcp.ip": "127.0.0.1", "management.tcp.port": self._management_port}
                if self._plugins
                else {}
            ),
            **(self._tls_settings() if self._tls else {}),
            **self._settings,
        }
        self._write("rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in settings.items()))
        return ["/bin/sh", "-c", _NODE_AND_PORT_MAPPER]

    def _tls_settings(self) -> Mapping[str, str]:
        self.tls_port = free_port()
        files = {"cacertfile": "ca.pem", "certfile": "certificate.pem", "keyfile": "key.pem"}
        return {
            "listeners.ssl.default": f"127.0.0.1:{self.tls_port}",
            **{f"ssl_options.{option}": f"{self.folder}/{name}" for option, name in files.items()},
        }

    def _variables(self) -> Mapping[str, str]:
        found = [self.folder, self._erlang] if self._erlang else [Path(shutil.which("erl") or "/usr/bin/erl").parent]
        return {
            "PATH": ":".join(map(str, [*found, self.programs.folder, "/usr/bin", "/bin"])),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": f"{self._mapper_port}",
            "RABBITMQ_NODENAME": "outbox@localhost",
            "RABBITMQ_DIST_PORT": f"{self._node_port}",
            "RABBITMQ_MNESIA_BASE": f"{self.folder}/data",
            "RABBITMQ_LOG_BASE": f"{self.folder}",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{self.folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{self.folder}/enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # the machine's own is about the machine's own broker
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{_LOOPBACK_ONLY} {_NO_BUSY_WAITING}",
        }

    def _is_ready(self, process_id: int) -> bool:
        return "Server startup complete" in self._said()

    def _last_words(self) -> str:
        # A crash tells its reason first, and then pages of what else it ended.
        errors = [line.partition("> ")[2].strip() for line in self._said().splitlines() if " [error] " in line]
        return "\n".join(filter(None, errors))[:2000] or super()._last_words()

    def _write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text)
        account().owns(file)
        return file
