"""Serve: the shop and the warehouse with one command, each in a process of its own."""

import base64
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main(shop_port: int = 8000, warehouse_port: int = 8001) -> None:
    shared = settings(shop_port, warehouse_port)
    services = [start("shop", shop_port, shared), start("warehouse", warehouse_port, shared)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for service in services:
            service.wait()
    except KeyboardInterrupt:
        for service in services:
            service.send_signal(signal.SIGINT)
        for service in services:
            service.wait()


def settings(shop_port: int, warehouse_port: int) -> dict[str, str]:
    return {
        "ORDERS_SECRET": f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}",
        "SHOP_URL": f"http://127.0.0.1:{shop_port}/events/",
        "WAREHOUSE_URL": f"http://127.0.0.1:{warehouse_port}/events/",
    }


def start(name: str, port: int, shared: dict[str, str]) -> subprocess.Popen[bytes]:
    uvicorn = [sys.executable, "-m", "uvicorn", "--app-dir", str(FOLDER), "--no-access-log"]
    return subprocess.Popen([*uvicorn, "--port", str(port), f"{name}:app"], env={**shared, **os.environ})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
