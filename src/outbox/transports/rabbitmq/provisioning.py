"""Provisioning: a topology as RabbitMQ's definitions and as Terraform, with the permissions that suffice on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from outbox.core.transport import Provisioning
from outbox.transports.rabbitmq.topology import Exchange, Topology

NOTHING = "^$"  # a permission that matches no name


@dataclass(frozen=True, slots=True)
class Permissions:
    """The least that a process needs where everything is provisioned, as regular expressions of names."""

    role: str  # "relay" or "worker"
    write: str
    read: str
    configure: str = NOTHING


def permissions(topology: Topology) -> tuple[Permissions, ...]:
    """Those of a relay and of a worker; a user for both needs both."""
    exchange = re.escape(topology.names.exchange)
    # A worker makes a queue for trials, if a message is ever suspected, and binds it to the exchange of dead letters.
    trials = rf"{exchange}\.trial_.*"
    return (
        Permissions("relay", write=f"^{exchange}$", read=NOTHING),
        Permissions(
            "worker",
            configure=f"^{trials}$",
            write=rf"^{exchange}\.(delay_.*|dlx|trial_.*)$",
            read=_any_of(topology.consumed, rf"{exchange}\.dlx", trials),
        ),
    )


def provisioning(topology: Topology, vhost: str, users: Mapping[str, str]) -> Provisioning:
    """All that `outbox topology` prints."""
    return Provisioning(
        tables=(
            (("exchange", "type"), [(each.name, each.kind) for each in _exchanges(topology)]),
            (("queue", "arguments"), [(queue.name, _listed(queue.arguments)) for queue in topology.queues]),
            (
                ("exchange", "routing key", "queue"),
                [(each.exchange, each.routing_key, each.queue) for each in topology.bindings],
            ),
            (
                ("user", "configure", "write", "read"),
                [
                    (users.get(each.role, each.role), each.configure, each.write, each.read)
                    for each in permissions(topology)
                ],
            ),
        ),
        definitions=definitions(topology, vhost, users),
        terraform=terraform(topology, vhost, users),
    )


def definitions(topology: Topology, vhost: str, users: Mapping[str, str]) -> dict[str, object]:
    """What `rabbitmqctl import_definitions` takes; `users` are those that exist, by their role."""
    return {
        "exchanges": [
            {
                "name": exchange.name,
                "vhost": vhost,
                "type": exchange.kind,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": {},
            }
            for exchange in _exchanges(topology)
        ],
        "queues": [
            {
                "name": queue.name,
                "vhost": vhost,
                "durable": True,
                "auto_delete": False,
                "arguments": dict(queue.arguments),
            }
            for queue in topology.queues
        ],
        "bindings": [
            {
                "source": binding.exchange,
                "vhost": vhost,
                "destination": binding.queue,
                "destination_type": "queue",
                "routing_key": binding.routing_key,
                "arguments": {},
            }
            for binding in topology.bindings
        ],
        "permissions": [
            {
                "user": users[each.role],
                "vhost": vhost,
                "configure": each.configure,
                "write": each.write,
                "read": each.read,
            }
            for each in permissions(topology)
            if each.role in users
        ],
    }


def terraform(topology: Topology, vhost: str, users: Mapping[str, str]) -> str:
    """Resources of the provider cyrilgdn/rabbitmq; the marker is made when all else is there."""
    label = _label(topology.names.exchange)
    return "\n\n".join(
        [
            _resource(
                "rabbitmq_exchange",
                label,
                for_each={exchange.name: _quoted(exchange.kind) for exchange in topology.exchanges},
                fields={"name": "each.key", "vhost": _quoted(vhost)},
                block=("settings", {"type": "each.value", "durable": "true"}),
            ),
            _resource(
                "rabbitmq_queue",
                label,
                for_each={queue.name: f"jsonencode({_object(queue.arguments)})" for queue in topology.queues},
                fields={"name": "each.key", "vhost": _quoted(vhost)},
                block=("settings", {"durable": "true", "arguments_json": "each.value"}),
                after=[f"rabbitmq_exchange.{label}"],
            ),
            _resource(
                "rabbitmq_binding",
                label,
                for_each={
                    f"{binding.exchange} {binding.routing_key} {binding.queue}": _object(
                        {"source": binding.exchange, "destination": binding.queue, "routing_key": binding.routing_key}
                    )
                    for binding in topology.bindings
                },
                fields={
                    "source": "each.value.source",
                    "vhost": _quoted(vhost),
                    "destination": "each.value.destination",
                    "destination_type": _quoted("queue"),
                    "routing_key": "each.value.routing_key",
                },
                after=[f"rabbitmq_exchange.{label}", f"rabbitmq_queue.{label}"],
            ),
            *(_marker(label, marker, vhost) for marker in [topology.marker] if marker is not None),
            *_permission_resources(topology, label, vhost, users),
        ]
    )


def _marker(label: str, marker: Exchange, vhost: str) -> str:
    return _resource(
        "rabbitmq_exchange",
        f"{label}_topology",
        fields={"name": _quoted(marker.name), "vhost": _quoted(vhost)},
        block=("settings", {"type": _quoted(marker.kind), "durable": "true"}),
        after=[f"rabbitmq_binding.{label}"],
    )


def _permission_resources(topology: Topology, label: str, vhost: str, users: Mapping[str, str]) -> Iterator[str]:
    for each in permissions(topology):
        if each.role in users:
            rights = {"configure": each.configure, "write": each.write, "read": each.read}
            yield _resource(
                "rabbitmq_permissions",
                f"{label}_{each.role}",
                fields={"user": _quoted(users[each.role]), "vhost": _quoted(vhost)},
                block=("permissions", {name: _quoted(pattern) for name, pattern in rights.items()}),
            )


def _resource(
    kind: str,
    label: str,
    *,
    fields: Mapping[str, str],
    for_each: Mapping[str, str] | None = None,
    block: tuple[str, Mapping[str, str]] | None = None,
    after: Iterable[str] = (),
) -> str:
    lines = [f'resource "{kind}" "{label}" {{']
    if for_each is not None:
        each = {_quoted(name): value for name, value in for_each.items()}
        lines += ["  for_each = {", *_assignments(each, indent=4), "  }", ""]
    lines += _assignments(fields, indent=2)
    if block is not None:
        lines += ["", f"  {block[0]} {{", *_assignments(block[1], indent=4), "  }"]
    if after:
        lines += ["", f"  depends_on = [{', '.join(after)}]"]
    return "\n".join([*lines, "}"])


def _assignments(values: Mapping[str, str], indent: int) -> list[str]:
    width = max(map(len, values))
    return [f"{'':{indent}}{name:<{width}} = {value}" for name, value in values.items()]


def _object(values: Mapping[str, object]) -> str:
    return f"{{ {', '.join(f'{_quoted(name)} = {_literal(value)}' for name, value in values.items())} }}"


def _literal(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """A string as Terraform reads it: JSON's, with the beginnings of templates doubled."""
    return json.dumps(text).replace("${", "$${").replace("%{", "%%{")


def _label(name: str) -> str:
    label = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return label if label[0].isalpha() or label[0] == "_" else f"_{label}"


def _exchanges(topology: Topology) -> Iterator[Exchange]:
    yield from topology.exchanges
    if topology.marker is not None:
        yield topology.marker


def _listed(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())


def _any_of(names: Iterable[str], *patterns: str) -> str:
    return f"^({'|'.join([*map(re.escape, names), *patterns])})$"
