"""One worker process: ``python -m api.http.worker FD`` serves the listening socket that it inherited."""

from __future__ import annotations

import logging.config
import socket
import sys

import uvicorn

from api.http.app import create_app
from api.http.settings import Settings

GRACE_SECONDS = 30
"""How long requests that are being answered at the end may take."""

_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "api: %(message)s"}, "access": {"format": "%(asctime)s %(message)s"}},
    "handlers": {
        "plain": {"class": "logging.StreamHandler", "formatter": "plain"},
        "access": {"class": "logging.StreamHandler", "formatter": "access", "stream": "ext://sys.stdout"},
    },
    "loggers": {
        "api.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        "uvicorn": {"handlers": ["plain"], "level": "WARNING", "propagate": False},
    },
    "root": {"handlers": ["plain"], "level": "INFO"},
}


def main(fd: int) -> None:
    """Serve until SIGTERM or SIGINT. Exits with 1 if it could not be started."""
    logging.config.dictConfig(_LOGGING)
    settings = Settings.from_environment()
    logging.getLogger("api.access").disabled = not settings.access_log
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[socket.socket(fileno=fd)])
    raise SystemExit(0 if server.started else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
