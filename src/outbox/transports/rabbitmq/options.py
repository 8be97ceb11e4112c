"""RabbitmqOptions: the settings that RabbitMQ's transport takes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitmqOptions:
    """By their names in `setup()`, where each is described."""

    exchange_name: str = "outbox"
    queue_prefix: str = ""
    rabbitmq_management_url: str = field(default="", repr=False)  # it may hold a password
