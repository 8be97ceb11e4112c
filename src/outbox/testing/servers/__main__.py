"""The command: runs one server until Ctrl-C."""

import argparse
import os
import signal

from outbox.testing.servers import SERVERS, ServerFailed, ServerMissing
from outbox.testing.servers.ladder import DOWNLOADS


def main() -> None:
    """Run one server until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m outbox.testing.servers", description=main.__doc__)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--download", action="store_true", help="download Debian packages if there is no other way")
    arguments = parser.parse_args()
    if arguments.download:
        os.environ[DOWNLOADS] = "1"
    chosen = SERVERS[arguments.server]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    try:
        with chosen() as server:
            print(f"{server.how}\n{server.url}", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    except (ServerMissing, ServerFailed) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
