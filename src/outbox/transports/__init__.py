"""Transports: one file per broker. Each is imported when its name is used, because it needs its broker's client."""

import typing
from importlib import import_module

from outbox.core.webhooks import Secrets, sign

if typing.TYPE_CHECKING:
    from outbox.transports.database import DatabaseTransport
    from outbox.transports.function import FunctionTransport
    from outbox.transports.http import HttpTransport, check_url
    from outbox.transports.memory import MemoryTransport
    from outbox.transports.rabbitmq import RabbitmqTransport
else:
    _MODULES = {
        "DatabaseTransport": "database",
        "FunctionTransport": "function",
        "HttpTransport": "http",
        "MemoryTransport": "memory",
        "RabbitmqTransport": "rabbitmq",
        "check_url": "http",
    }

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DatabaseTransport",
    "FunctionTransport",
    "HttpTransport",
    "MemoryTransport",
    "RabbitmqTransport",
    "Secrets",
    "check_url",
    "sign",
]
