"""Broker: what a test does to a RabbitMQ beside talking AMQP, through its management interface."""

from __future__ import annotations

import base64
import json
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from outbox.testing.servers import RabbitMQ, Server

LONG = 60.0  # seconds after which a broker that does not answer is lost


class Management:
    """The management interface of a broker, spoken to as the user of its URL."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, method: str, *path: str, **body: object) -> Any:
        """Its answer; a path such as ("queues", "/", "orders") needs no quoting."""
        address = self._address
        user = base64.b64encode(f"{address.username}:{address.password}".encode()).decode()
        request = Request(
            f"http://{address.hostname}:{address.port}/api/{'/'.join(quote(part, safe='') for part in path)}",
            method=method,
            data=None if method == "GET" else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {user}", "Content-Type": "application/json"},
        )
        with urlopen(request, timeout=LONG) as answer:  # noqa: S310 - always http
            text = answer.read()
        return json.loads(text) if text else None

    @property
    def _address(self) -> Any:
        if isinstance(self.server, RabbitMQ):
            return urlsplit(self.server.management_url)
        given = urlsplit(self.server.url)
        return given._replace(netloc=f"{given.username}:{given.password}@{given.hostname}:15672")


class VirtualHost:
    """A virtual host of its own: exchanges, queues and permissions that nobody else sees."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self.url = _with_path(server.url, name)
        self.management = Management(server)
        self._users: list[str] = []

    @cached_property
    def server_version(self) -> tuple[int, ...]:
        """Which RabbitMQ it is on: what its queues need depends on that."""
        version: str = self.management.ask("GET", "overview")["rabbitmq_version"]
        return tuple(int(part) for part in version.split("-")[0].split("+")[0].split("."))

    def create(self) -> None:
        self.management.ask("PUT", "vhosts", self.name)

    def delete(self) -> None:
        for user in self._users:
            self.management.ask("DELETE", "users", user)
        self.management.ask("DELETE", "vhosts", self.name)

    def url_of_user(self, *, configure: str = "^$", write: str = "^$", read: str = "^$") -> str:
        """The URL of a new user with these permissions here, and none elsewhere."""
        user = f"{self.name}-{len(self._users)}"
        self.management.ask("PUT", "users", user, password="secret", tags="")
        self._users.append(user)
        permissions = {"configure": configure, "write": write, "read": read}
        self.management.ask("PUT", "permissions", self.name, user, **permissions)
        address = urlsplit(self.url)
        return address._replace(netloc=f"{user}:secret@{address.hostname}:{address.port}").geturl()

    def let_in(self, url: str, allowed: bool) -> None:
        """Let the user of a URL do everything here, or not even connect."""
        path = ("permissions", self.name, urlsplit(url).username or "")
        if allowed:
            self.management.ask("PUT", *path, configure=".*", write=".*", read=".*")
        else:
            self.management.ask("DELETE", *path)

    def queues(self) -> dict[str, Any]:
        """Its queues by name; arguments are as of now, counts up to a second old, and in a given broker up to five."""
        return {queue["name"]: queue for queue in self.management.ask("GET", "queues", self.name)}

    def exchanges(self) -> dict[str, Any]:
        """Its exchanges by name, without those that every virtual host has."""
        found = self.management.ask("GET", "exchanges", self.name)
        return {one["name"]: one for one in found if one["name"] and not one["name"].startswith("amq.")}

    def bindings(self) -> list[Any]:
        """Its bindings, without those to the default exchange."""
        return [binding for binding in self.management.ask("GET", "bindings", self.name) if binding["source"]]

    def close_connections(self) -> int:
        """Close every connection to it, as an operator would; return how many."""
        connections = self.management.ask("GET", "vhosts", self.name, "connections")
        for connection in connections:
            self.management.ask("DELETE", "connections", connection["name"])
        return len(connections)


def _with_path(url: str, name: str) -> str:
    return urlsplit(url)._replace(path=f"/{quote(name, safe='')}").geturl()
