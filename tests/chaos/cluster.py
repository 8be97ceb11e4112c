"""Cluster: three nodes of RabbitMQ, of which one at a time may die, behind a proxy that balances the load."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from outbox.testing.servers import RabbitMQ, ServerFailed
from tests.chaos.broker import LOOK_EVERY, Broker, CountingRabbitMQ
from tests.support.proxy import Link

NODES = 3
BUSIEST_QUEUE = "invoices"
COOKIE = "chaos"  # by which nodes know each other
JOINED_WITHIN = 90.0  # seconds from the start of a node until every queue has all its members again


class PortMapper(RabbitMQ):
    """Tells nodes of each other's ports. It outlives each of them."""

    def _command(self) -> list[str]:
        self._node_port, self._mapper_port = 0, self.port
        return ["/bin/sh", "-c", "exec epmd"]

    def _is_ready(self, process_id: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


class Node(CountingRabbitMQ):
    """One of the cluster; each but the first one joins the first."""

    def __init__(self, number: int, mapper: PortMapper) -> None:
        peers = (self.named(each) for each in dict.fromkeys((1, number)))
        super().__init__(
            management=False,
            settings={
                "cluster_formation.peer_discovery_backend": "classic_config",
                "cluster_formation.randomized_startup_delay_range.min": "0",
                "cluster_formation.randomized_startup_delay_range.max": "0",
                **{f"cluster_formation.classic_config.nodes.{place}": peer for place, peer in enumerate(peers, 1)},
            },
        )
        self.node_name = self.named(number)
        self._mapper = mapper

    @staticmethod
    def named(number: int) -> str:
        return f"outbox-{number}@localhost"

    def _prepare(self) -> None:
        super()._prepare()
        self._write(".erlang.cookie", COOKIE).chmod(0o400)

    def _command(self) -> list[str]:
        super()._command()
        self._mapper_port = self._mapper.port
        return ["rabbitmq-server"]

    def _variables(self) -> Mapping[str, str]:
        return {**super()._variables(), "RABBITMQ_NODENAME": self.node_name}


class Cluster(Broker):
    """Its queues are replicated, so that what was confirmed outlives any one node."""

    def __init__(self) -> None:
        super().__init__()
        self._mapper = PortMapper(management=False)
        self.nodes = [Node(number, self._mapper) for number in range(1, NODES + 1)]
        self._down: set[str] = set()
        self._links = 0

    def _start_all(self, stack: ExitStack) -> None:
        stack.enter_context(self._mapper)
        for node in self.nodes:
            stack.enter_context(node)

    @property
    def _asked(self) -> RabbitMQ:
        return next(node for node in self.nodes if node.node_name not in self._down)

    def link(self, name: str) -> Link:
        """Through a proxy that takes the next node where one is gone; each link begins with another one."""
        first = self._links % NODES
        self._links += 1
        return self._proxy.broker_link(name, *(node.port for node in [*self.nodes[first:], *self.nodes[:first]]))

    # Faults.

    def kill_leader(self) -> Node:
        """Kill the node that leads the busiest queue, with SIGKILL and nothing before it."""
        leader = self.leaders()[BUSIEST_QUEUE]
        return self.kill(next(node for node in self.nodes if node.node_name == leader))

    def kill(self, node: Node) -> Node:
        self._down.add(node.node_name)
        node.kill()
        return node

    def stop(self, node: Node) -> Node:
        self._down.add(node.node_name)
        node.stop()
        return node

    def start(self, node: Node) -> None:
        """Start it again, and wait until it follows in every queue: two of three lead nothing if another one dies."""
        node.start()
        self._down.discard(node.node_name)
        deadline = time.monotonic() + JOINED_WITHIN
        while missing := self._without_a_member():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all members of {missing} are back after {JOINED_WITHIN:g} s")
            time.sleep(LOOK_EVERY)

    # Looking.

    def leaders(self) -> Mapping[str, str]:
        """By queue, the name of the node that leads it."""
        return {name: leader for name, leader, *_ in self._rows("name", "leader") if leader}

    def _without_a_member(self) -> list[str]:
        rows: Sequence[list[str]] = [["everything", "[]", ""]]  # where no node answers yet
        with suppress(ServerFailed):
            rows = self._rows("name", "members", "online")
        return [name for name, members, online, *_ in rows if _count(members) != _count(online)]

    def _rows(self, *columns: str) -> list[list[str]]:
        """Lines without the heading; a column that a queue has not is empty."""
        rows = [line.split("\t") for line in self._listed(*columns)]
        return [[*row, *[""] * len(columns)] for row in rows if row[0] != columns[0] and len(row) > 1]


def _count(listed: str) -> int:
    """How many names a list of rabbitmqctl holds, such as `[a@localhost, b@localhost]`."""
    return listed.count("@")
